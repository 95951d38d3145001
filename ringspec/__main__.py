"""``python -m ringspec`` is the command ``ringspec``."""

from ringspec.cli import main

if __name__ == "__main__":
    main(prog_name="ringspec")
