"""Run a program by_hand_*.py, which checks an implementation without ringspec."""

import json
import subprocess
import sys
from pathlib import Path


def by_hand(name, *words):
    """What the program by_hand_NAME.py prints, as data."""
    program = Path(__file__).with_name(f"by_hand_{name}.py")
    command = [sys.executable, str(program), *map(str, words)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)
