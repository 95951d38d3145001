"""The example of docs/nki/index.md prints what the page shows."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "nki" / "index.md"


def test_the_kernel_of_the_page_prints_what_the_page_shows():
    [shown] = re.findall(r"\$ python docs/nki/sum_of_ranks.py\n(.*?)```", PAGE.read_text(), re.S)
    command = [sys.executable, "docs/nki/sum_of_ranks.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == shown


def test_the_bounds_of_the_page_are_those_that_it_describes():
    [code] = re.findall(r"```python\n(import numpy.*?)```", PAGE.read_text(), re.S)
    made = {}
    exec(code, made)  # noqa: S102
    least, most = made["bound_min"], made["bound_max"]
    assert least.shape == most.shape == (4, 1, 8, 1)
    assert least.dtype == np.float32
    tokens, starts = made["tokens"], made["cu_seqlens"]
    for owner in range(4):
        for row, query in enumerate(tokens[1]):
            seen = range(int(least[owner, 0, row, 0]), int(most[owner, 0, row, 0]))
            start = max(x for x in starts if x <= query)
            assert list(tokens[owner][seen]) == [x for x in tokens[owner] if start <= x <= query]
