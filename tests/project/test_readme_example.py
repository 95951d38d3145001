"""The README's example runs and prints what the README says that it prints."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_example_prints_the_numbers_that_stand_below_it():
    text = README.read_text()
    *_, program = re.findall(r"```python\n(.*?)```", text, re.S)
    (printed,) = re.findall(r"```text\n(.*?)```", text, re.S)
    assert 10 <= len([line for line in program.splitlines() if line.strip()]) <= 15
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == printed
