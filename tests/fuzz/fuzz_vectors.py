"""Fuzz what reads golden vectors from outside, with atheris.

    python tests/fuzz/fuzz_vectors.py -max_total_time=60

Options and folders of inputs are libFuzzer's own. Without a folder it starts from the files of a small
good set. A finding ends the run with a traceback and leaves the input in a file ``crash-...``; give
that file as argument to see it again.
"""

import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def main() -> None:
    # pytest imports every file for its examples; atheris is no dependency of the tests.
    import atheris

    sys.path[:0] = [str(TESTS), str(TESTS.parent)]
    with atheris.instrument_imports(include=["ringspec"]):
        from fuzz import targets

    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        for number, seed in enumerate(targets.seeds(Path(folder) / "set")):
            (corpus / f"{number:03}").write_bytes(seed)
        arguments = list(sys.argv)
        if all(argument.startswith("-") for argument in arguments[1:]):
            arguments.append(str(corpus))
        atheris.Setup(arguments, targets.run)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
