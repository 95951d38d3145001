"""The text that ``ringspec explain`` prints."""

from __future__ import annotations

import sys

from ringspec.cli.shared import output
from ringspec.cli.views.check import plain
from ringspec.conformance.run.executor import close, opened
from ringspec.conformance.run.explain import Explained, explain_target
from ringspec.conformance.target.project import target_or_default

NOTHING = 3


def run(target: str | None, timeout: float, as_json: bool) -> None:
    """Load a target (an implementation under test), infer from its results what it computes, and print this.

    Ends the program with exit code 1 if the target computes something wrong, and with 3 if nothing can be inferred.
    """
    spec = target_or_default(target)
    found = opened(spec, timeout or None, here=not timeout)
    try:
        name, told = found.name, explain_target(found)
    finally:
        close(found)
    if as_json:
        output.show_json({"target": {"name": name, "spec": spec}, **told.as_dict()})
    else:
        output.show(map(plain, lines(name, spec, told)))
    if not told.right:
        sys.exit(1 if told.runs else NOTHING)


def lines(name: str, spec: str, told: Explained) -> list[str]:
    """Return the text of an explanation."""
    head = name if name == spec else f"{name} ({spec})"
    if told.unread:
        return [head, f"nothing was read: {told.unread}"]
    ids = ", ".join(one.problem.id.removeprefix("readout/") for one in told.runs)
    found = [head, f"read with {ids}", ""]
    if told.right:
        return [*found, f"computes what the definition says, in {len(told.runs)} problems"]
    found += told.sentences
    found += [f"Another change gives the same results: {one}" for one in told.told.alternatives]
    count = len(told.told.explained)
    if count:
        found.append(
            f"This accounts for every number in {count} of the {told.wrong} problems that failed."
        )
    if told.told.hint:
        found.append(f"{told.told.hint[0].upper()}{told.told.hint[1:]}.")
    if told.known is not None:
        found += [
            "",
            f"known bug: {told.known['title']} [{told.known['id']}]",
            *told.known["links"],
        ]
    return found
