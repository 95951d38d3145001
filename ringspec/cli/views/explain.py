"""The text that ``ringspec explain`` prints."""

from __future__ import annotations

import importlib
import sys
import threading
from typing import TYPE_CHECKING

from ringspec.cli.shared import output
from ringspec.cli.shared.progress import trying
from ringspec.conformance.run.opening import close, opened
from ringspec.conformance.target.project import target_or_default

if TYPE_CHECKING:
    from ringspec.conformance.explain.explain import Explained

NOTHING = 3
EXPLAIN = "ringspec.conformance.explain.explain"


def run(target: str | None, timeout: float, thorough: bool, as_json: bool) -> None:
    """Load a target (an implementation under test), infer from its results what it computes, and print this.

    Ends the program with exit code 1 if the target computes something wrong, and with 3 if nothing can be inferred.
    """
    spec = target_or_default(target)
    # This module takes as long to load as the target's process takes to start.
    threading.Thread(target=importlib.import_module, args=(EXPLAIN,), daemon=True).start()
    found = opened(spec, timeout or None, here=not timeout)
    try:
        from ringspec.conformance.explain.explain import explain_target

        with trying("read", wanted=not as_json) as show:
            explained = explain_target(
                found, thorough=thorough, progress=lambda id: show(id.partition("/")[2])
            )
    finally:
        close(found)
    name = found.name
    if as_json:
        output.show_json({"target": {"name": name, "spec": spec}, **explained.as_dict()})
    else:
        output.show(map(output.printable, lines(name, spec, explained, thorough)))
    if not explained.right:
        sys.exit(1 if explained.runs else NOTHING)


def lines(name: str, spec: str, explained: Explained, thorough: bool = False) -> list[str]:
    """Return the text of an explanation; ``thorough``: whether the search was a long one."""
    head = name if name == spec else f"{name} ({spec})"
    if explained.unread:
        return [head, f"nothing was read: {explained.unread}"]
    found = [head, *read_with(explained), ""]
    if explained.right:
        count = len(explained.runs)
        problems = "1 problem" if count == 1 else f"{count} problems"
        found.append(f"computes what the definition says, in {problems}")
        if explained.claimed_not_read:
            kinds = explained.claimed_not_read.items()
            left = "; ".join(f"{kind} {', '.join(map(str, values))}" for kind, values in kinds)
            found.append(f"claimed, but not read: {left}. ringspec check tests them.")
        return found
    found += explained.sentences
    found += [f"Another fault with the same results: {one}" for one in explained.alternatives]
    count = len(explained.conclusion.explained) + len(explained.conclusion.others)
    if count:
        which = (
            f"{count} of the {explained.wrong} problems" if explained.wrong > 1 else "the problem"
        )
        found.append(
            f"{'These sentences account' if explained.conclusion.others else 'This accounts'} for every number in {which} that failed."
        )
    if count and explained.unexplained:
        names = [id.partition("/")[2] for id in explained.unexplained]
        found.append(f"Not explained: {', '.join(names)}.")
    if explained.searched and count < explained.wrong and not thorough:
        found.append("A longer search, with --thorough, may explain more.")
    if explained.hint:
        found.append(f"{explained.hint[0].upper()}{explained.hint[1:]}.")
    if explained.known is not None:
        found += [
            "",
            f"known bug: {explained.known['title']} [{explained.known['id']}]",
            *(f"reported: {link}" for link in explained.known["links"]),
        ]
    return found


def read_with(explained: Explained) -> list[str]:
    """Say which problems were run: in a ring, or as blocks."""
    from ringspec.conformance.readout.block_words import BLOCK, DENSE

    ids = [one.problem.id for one in explained.runs]
    if explained.made_of == BLOCK:
        alone = [x.removeprefix("block/") for x in ids if x.startswith("block/")]
        several = [x.removeprefix("blocks/") for x in ids if x.startswith("blocks/")]
        parts = max(one.problem.call.workers for one in explained.runs)
        found = [f"read as one block, with {', '.join(alone)}"] if alone else []
        if several:
            size = f"{parts} x {parts} blocks, merged by the specification"
            found += [f"read as {size}, with {', '.join(several)}"]
        return found
    names = [x.removeprefix("readout/") for x in ids]
    if explained.made_of == DENSE:
        names = [x.removesuffix("-kv").removesuffix("-contiguous") for x in names]
    return [f"read with {', '.join(names)}"]
