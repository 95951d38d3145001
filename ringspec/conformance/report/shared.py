"""Find failures that several cases share, so that the report shows each one once.

If results have a wrong dtype in several cases, the report also suggests how the program under test should declare it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ringspec.compare.bounds import RECIPE_OF_FORMAT
from ringspec.conformance.report.records import FAILURES, Record
from ringspec.conformance.target.declared import declared_recipe
from ringspec.errors import OptionError

FEWEST = 3  # cases; fewer are shown one by one
FAULT = re.compile(r"(\w+) of worker \d+ is (\w+), expected (\w+)")
# The rounding point of a recipe that sets the dtype of a result; gradients for all others.
POINTS = {"o": "outputs", "lse": "lse", "dsinks": "lse"}


def same_message(records: Sequence[Record]) -> dict[str, list[str]]:
    """Group failures by outcome and message.

    The result maps the id of each group's first case to the ids of its other cases. Groups of fewer than three cases
    are left out. So are wrong numbers (outcome 'mismatch'), because each message says where the numbers are wrong.

    >>> same_message([Record(id, "error", message="no GPU") for id in "abc"])
    {'a': ['b', 'c']}
    """
    found: dict[tuple[str, str], list[str]] = {}
    for one in records:
        if one.outcome in FAILURES and one.outcome != "mismatch" and one.message:
            found.setdefault((one.outcome, one.message), []).append(one.id)
    return {first: rest for first, *rest in found.values() if len(rest) + 1 >= FEWEST}


def dtype_fault(tensor: str, worker: int, got: str, expected: str) -> str:
    """Describe a wrong dtype in the words that the pattern :data:`FAULT` matches.

    >>> dtype_fault("o", 0, "float32", "bfloat16")
    'o of worker 0 is float32, expected bfloat16'
    """
    return f"{tensor} of worker {worker} is {got}, expected {expected}"


def with_shared_dtype(records: Sequence[Record]) -> list[Record]:
    """Return the records of cases with a wrong dtype; [] if there are fewer than :data:`FEWEST` cases."""
    alike = [one for one in records if one.outcome == "wrong dtype"]
    return alike if len(alike) >= FEWEST else []


def shared_dtype_lines(records: Sequence[Record], declared: Any = None) -> list[str]:
    r"""Say how many cases return which wrong dtype, and how to fix it.

    ``declared``: the rounding that the program under test declares (its claim ``recipe``). The suggested claim extends
    it.

    >>> text = "o of worker 0 is float32, expected bfloat16; dq of worker 0 is float32, expected bfloat16"
    >>> wrong = [Record(id, "wrong dtype", {"inputs": "bfloat16"}, message=text) for id in "abc"]
    >>> print(*shared_dtype_lines(wrong), sep="\n")
    3 cases fail for one reason: with bfloat16 inputs, o and dq are float32, expected bfloat16
      Fix: return bfloat16. If the kernel returns float32 on purpose, declare its output dtype with
      recipe={"bfloat16": {"base": "bf16", "outputs": "float32", "gradients": "float32"}}
    """
    faults: dict[tuple[str, str, str], dict[str, None]] = {}
    for record in records:
        for tensor, got, expected in FAULT.findall(record.message):
            key = str(record.needs.get("inputs", "")), got, expected
            faults.setdefault(key, {})[tensor] = None
    reasons = [
        f"with {inputs} inputs, {listed(tensors)} {'is' if len(tensors) == 1 else 'are'} {got}, "
        f"expected {expected}"
        for (inputs, got, expected), tensors in faults.items()
    ]
    count = (
        f"{len(records)} cases fail for {'one reason' if len(reasons) == 1 else 'these reasons'}"
    )
    claim = claim_for(faults, declared)
    lines = [f"{count}: {'; '.join(reasons)}"]
    returned = " or ".join(dict.fromkeys(expected for _, _, expected in faults))
    if claim is None:
        return [*lines, f"  Fix: return {returned}"]
    on_purpose = " or ".join(dict.fromkeys(got for _, got, _ in faults))
    return [
        *lines,
        f"  Fix: return {returned}. If the kernel returns {on_purpose} on purpose, declare its output "
        "dtype with",
        f"  recipe={claim}",
    ]


def listed(names: Mapping[str, None]) -> str:
    """Join names to 'o', 'o and dq' or 'o, dq and dk'."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def claim_for(
    faults: Mapping[tuple[str, str, str], Mapping[str, None]], declared: Any
) -> str | None:
    """Return the claim ``recipe``, as text, that allows the returned dtypes; None if no recipe does."""
    claims: dict[str, dict[str, Any]] = {}
    for (inputs, got, _), tensors in faults.items():
        if inputs not in RECIPE_OF_FORMAT:
            return None
        said = declared.get(inputs) if isinstance(declared, Mapping) else declared
        base = said if isinstance(said, Mapping) else {"base": said or RECIPE_OF_FORMAT[inputs]}
        points = {POINTS.get(tensor, "gradients"): got for tensor in tensors}
        claims[inputs] = claims.get(inputs, dict(base)) | points
    try:
        for inputs in claims:
            declared_recipe(claims, inputs)
    except OptionError:
        return None
    return json.dumps(claims)
