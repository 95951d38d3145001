"""Run the command ``ringspec`` as ``python -m ringspec``."""

from ringspec.cli import main

if __name__ == "__main__":
    main(prog_name="ringspec")
