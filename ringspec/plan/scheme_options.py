"""Plan every way to split attention: which schemes are possible on W ranks, on which meshes, and what each costs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ringspec.plan.moves import Split, cell_bytes, held, movements, sent
from ringspec.plan.scheme_question import AXES, SERVING, Question
from ringspec.plan.scheme_times import Times, scheme_times
from ringspec.schemes.mesh import Mesh
from ringspec.schemes.sharding import fewer_parts, padding

# What limits each scheme, and when to use it.
LIMITS = {
    "ring": "none on heads; a causal mask needs a layout that balances it, such as zigzag",
    "double_ring": "as `ring`",
    "all_gather": "memory: every rank holds all keys and values",
    "ulysses": "the axis must divide H; if it does not divide Hkv, key heads are copied",
    "usp": "the axis `ulysses` must divide H",
    "joint": "as `usp`; the text must fit on every rank",
    "pcp": "as `all_gather`; forward only",
    "dcp": "tp x dcp must divide H; the ranks of a dcp group hold the same key heads; forward only",
}
USES = {
    "ring": "if computing a block takes longer than sending one",
    "double_ring": "if the ring crosses slow links between nodes",
    "all_gather": "with few key heads, or masks of packed documents",
    "ulysses": "inside a node, if there are at least as many query heads as ranks",
    "usp": "for more ranks than heads: Ulysses within a node, a ring between nodes",
    "joint": "with a short text beside many image tokens",
    "pcp": "for a long prompt",
    "dcp": "to decode, if tensor parallelism would copy the cache: few key heads, or MLA",
}


@dataclass(frozen=True)
class SchemePass:
    """The cost of one pass on the busiest rank.

    ``sent``: bytes sent along each axis. ``held``: the most bytes held at any moment, without buffers in which something
    arrives. ``operations``: the names of its collective operations, in order. ``transfers``: how many there are, if each
    hop of a ring counts. ``messages``: messages that a rank sends. ``steps``: steps that compute. ``times``: None if there
    is no formula for the pairs of its steps.
    """

    name: str
    sent: dict[str, int]
    held: int
    operations: tuple[str, ...]
    transfers: int
    messages: int
    steps: int
    times: Times | None

    @property
    def bytes_sent(self) -> int:
        """The bytes sent along all axes."""
        return sum(self.sent.values())


@dataclass(frozen=True)
class SchemeOption:
    """A scheme on a mesh with a layout of the tokens; ``fits``: whether the memory of the device is at least ``held``."""

    scheme: str
    mesh: Mesh
    layout: str
    passes: tuple[SchemePass, ...]
    fits: bool

    @property
    def held(self) -> int:
        """The most bytes that a rank holds in any pass."""
        return max(one.held for one in self.passes)

    @property
    def times(self) -> Times | None:
        """The times of all passes together; None if one is unknown."""
        known = [one.times for one in self.passes if one.times is not None]
        if len(known) < len(self.passes):
            return None
        return Times(
            *(sum(getattr(x, n) for x in known) for n in ("compute", "waiting", "exposed"))
        )


@dataclass(frozen=True)
class Impossible:
    """A scheme that these ranks, heads and lengths do not permit: ``why``, and what would (``fix``)."""

    scheme: str
    why: str
    fix: str


def scheme_options(asked: Question) -> tuple[tuple[SchemeOption, ...], tuple[Impossible, ...]]:
    """Plan the wanted schemes on all meshes of W ranks; return those that are possible, and reasons for the others."""
    possible: list[SchemeOption] = []
    refused: list[Impossible] = []
    for scheme in asked.schemes if asked.work.workers > 1 else ():
        found = []
        reasons = [*unmet(asked, scheme)]
        for mesh in [] if reasons else meshes(asked, scheme):
            reason = refusal(asked, scheme, mesh)
            if reason is None:
                found.append(scheme_option(asked, scheme, mesh))
            else:
                reasons.append(reason)
        possible += found
        if not found:
            refused.append(reasons[0] if reasons else no_mesh(asked, scheme))
    return tuple(possible), tuple(refused)


def unmet(asked: Question, scheme: str) -> Iterator[Impossible]:
    """Return why a scheme is impossible on every mesh."""
    if scheme == "joint" and not asked.text:
        yield Impossible(scheme, "no tokens are text", "give their number, as in --text 512")


def meshes(asked: Question, scheme: str) -> list[Mesh]:
    """Return the meshes to plan: the given one, or all whose inner axis stays inside a fast link of the device.

    A scheme with two axes is planned only if both are longer than 1, dcp also without tp.
    """
    if asked.mesh is not None:
        return [asked.mesh]
    axes, workers = AXES[scheme], asked.work.workers
    if len(axes) == 1:
        return [Mesh(((axes[0], workers),))]
    near = max(link.workers or 0 for link in asked.hardware.links) or workers
    inside = workers if workers <= near else near
    inner = [x for x in range(2, inside + 1) if workers % x == 0 and inside % x == 0]
    found = [Mesh(((axes[0], workers // x), (axes[1], x))) for x in inner if x < workers]
    alone = [Mesh((("dcp", workers),))] if scheme == "dcp" and workers in inner else []
    allowed = [mesh for mesh in found if refusal(asked, scheme, mesh) is None]
    return (allowed or found) + alone


def refusal(asked: Question, scheme: str, mesh: Mesh) -> Impossible | None:
    """Return why a scheme is impossible on one mesh, and what would be possible; None if it is possible."""
    work, heads = asked.work, asked.work.heads
    axes = ("tp", "dcp") if scheme == "dcp" else ("ulysses",)
    parts = math.prod(mesh.size(axis) for axis in axes)
    if heads % parts:
        what = " x ".join(axis for axis in axes if mesh.size(axis) > 1)
        fix = padding(heads, work.kv_heads, parts)
        common = math.gcd(heads, work.workers)
        if scheme == "dcp":
            fix = f"{fewer_parts(heads, parts)} ranks, or {fix}"
        elif common > 1:
            fix = f"{usp_instead(asked, scheme, common)}, or {fix}"
        return Impossible(scheme, f"{what} = {parts} must divide H = {heads}", fix)
    if scheme == "joint" and (work.length - asked.text) % (work.workers * unit_of(asked.layout)):
        need = work.workers * unit_of(asked.layout)
        why = f"the {work.length - asked.text} tokens that are not text are no multiple of {need}"
        return Impossible(scheme, why, "pad the sequence")
    if scheme == "pcp" and new_tokens(asked, scheme) % (work.workers * unit_of(asked.layout)):
        why = f"{new_tokens(asked, scheme)} new tokens are no multiple of {work.workers * unit_of(asked.layout)}"
        return Impossible(scheme, why, "pad the new tokens")
    return None


def usp_instead(asked: Question, scheme: str, common: int) -> str:
    """Return USP (or ``joint``) with the longest axis ``ulysses`` inside a fast link; ``common`` = gcd(H, W)."""
    near = max(link.workers or 0 for link in asked.hardware.links) or common
    longest = max((x for x in range(2, near + 1) if common % x == 0), default=common)
    name = "usp" if scheme == "ulysses" else scheme
    return f"{name} with ring {asked.work.workers // longest} x ulysses {longest}"


def unit_of(layout: str) -> int:
    """Return the number of chunks of a rank: 2 in the zigzag layout, else 1."""
    return 2 if layout == "zigzag" else 1


def no_mesh(asked: Question, scheme: str) -> Impossible:
    """Return why a scheme with two axes has no mesh."""
    workers, axes = asked.work.workers, AXES[scheme]
    return Impossible(
        scheme,
        f"{workers} ranks have no mesh {axes[0]} x {axes[1]} with both axes longer than 1",
        f"a number of ranks that is a product, such as {2 * workers}",
    )


def new_tokens(asked: Question, scheme: str) -> int:
    """Return the number of new tokens of a serving scheme."""
    return asked.new or (asked.work.length if scheme == "pcp" else 1)


def split_of(asked: Question, scheme: str, mesh: Mesh) -> Split:
    """Return the sizes of a scheme; caches are interleaved one token at a time, so the first rank holds most."""
    work, ranks = asked.work, mesh.ranks
    tokens = keys = (work.length - (asked.text if scheme == "joint" else 0)) // ranks
    if scheme == "pcp":
        tokens = new_tokens(asked, scheme) // ranks
        keys = tokens + -(-(work.length - tokens * ranks) // ranks)
    if scheme == "dcp":
        tokens, keys = new_tokens(asked, scheme), -(-work.length // mesh.size("dcp"))
    text = asked.text if scheme == "joint" else 0
    return Split(scheme, mesh, work.heads, work.kv_heads, tokens, keys, work.length - text, text)


def scheme_option(asked: Question, scheme: str, mesh: Mesh) -> SchemeOption:
    """Plan one scheme on one mesh."""
    split = split_of(asked, scheme, mesh)
    both = asked.backward and scheme not in SERVING
    passes = tuple(scheme_pass(asked, split, backward) for backward in (False, True)[: 1 + both])
    fits = max(one.held for one in passes) <= asked.hardware.memory.value
    layout = "interleaved" if scheme == "dcp" else asked.layout
    return SchemeOption(scheme, mesh, layout, passes, fits)


def scheme_pass(asked: Question, split: Split, backward: bool) -> SchemePass:
    """Plan one pass on the rank that sends most."""
    each, ways = cell_bytes(asked.work, backward), movements(split, backward)
    busiest = max(ways, key=lambda way: sum(sent(way, each).values()))
    steps = split.mesh.ranks if split.scheme == "double_ring" else split.mesh.size("ring")
    return SchemePass(
        "backward" if backward else "forward",
        sent(busiest, each),
        max(held(way, each, backward) for way in ways),
        tuple(f"{one.thing}: {one.kind} along {one.axis}" for one in busiest.moves),
        sum(len(one.steps) for one in busiest.moves),
        sum(len(one.steps) * one.messages for one in busiest.moves),
        steps,
        scheme_times(
            split, busiest, each, asked.layout, asked.work, asked.hardware, backward, asked.overlap
        ),
    )
