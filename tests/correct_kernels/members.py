"""The collection: each member is one correct way to compute ring attention, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from correct_kernels import forward_normalised, forward_states, forward_two_pass
from correct_kernels.backward import BackwardWay, backward, delta_of
from correct_kernels.forward_states import Outputs
from correct_kernels.ring import Ring, Sizes
from correct_kernels.rounding import narrowed
from numpy.typing import NDArray

Forward = Callable[[Ring, Sizes], Outputs]
UNEVEN = (7, 33, 20)
NORMALISED = {"merge_order": "normalised"}
RUNNING = {"p_relative_to": "running"}


@dataclass(frozen=True)
class Member:
    """``forward`` with key tiles of ``sizes``; ``base2``: exp2 of scores in log2 units.

    ``unrounded_delta``: delta is of o before it was rounded to the format of the outputs.
    ``merge``: how two parts (o, lse) are merged, where the member merges such parts.
    ``declares``: what differs from the recipe of the input format, in the words of a declared recipe.
    """

    name: str
    what: str
    forward: Forward
    sizes: Sizes = None
    base2: bool = False
    way: BackwardWay = field(default_factory=BackwardWay)
    unrounded_delta: bool = False
    merge: Callable[..., Any] | None = None
    declares: dict[str, Any] = field(default_factory=dict)


def tiled(kind: str, forward: Forward, sizes: Sizes) -> Member:
    """A member with tiles of one size, in the forward and in the backward; no recipe says uneven ones."""
    label = "uneven" if isinstance(sizes, tuple) else str(sizes)
    changes = {} if isinstance(sizes, tuple) else {"tile_q": sizes, "tile_k": sizes}
    if changes and kind == "carried":
        changes |= RUNNING
    return Member(
        f"{kind}-tiles-{label}",
        f"{kind} state over tiles of {label} rows and columns",
        forward,
        sizes,
        way=BackwardWay(sizes, sizes),
        declares=changes,
    )


MEMBERS = {
    member.name: member
    for member in (
        Member("fresh-state", "a fresh state for each block, merged by (m, l, o)", forward_states.fresh),
        Member("normalised-merge", "blocks merged by (o, lse)", forward_normalised.weighted,
               merge=forward_normalised.by_weights, declares=NORMALISED),
        Member("sigmoid-merge", "blocks merged by (o, lse) in the sigmoid form", forward_normalised.sigmoid,
               merge=forward_normalised.by_sigmoid, declares=NORMALISED),
        Member("carried-state", "one state through all blocks", forward_states.carried,
               declares=RUNNING),
        Member("global-maximum", "the maximum over all keys first", forward_two_pass.global_maximum,
               declares={"p_relative_to": "row"}),
        Member("keys-backwards", "one state, keys from the last to the first", forward_states.backwards,
               64, way=BackwardWay(None, 64)),
        Member("tree-merge", "split keys merged in a tree", forward_states.tree, 32),
        Member("lazy-rescaling", "one state, rescaled where the maximum rises by more than 8 in log2 units",
               forward_states.lazy, 64, declares={"p_relative_to": "stale", "tile_k": 64}),
        Member("lazy-rescaling-base2", "lazy rescaling with exp2, as FlashAttention-4", forward_states.lazy,
               128, base2=True, declares={"p_relative_to": "stale", "tile_k": 128}),
        Member("fresh-state-base2", "a fresh state for each block; exp2 of log2-scaled scores",
               forward_states.fresh, base2=True),
        Member("carried-state-base2", "one state; exp2 of log2-scaled scores", forward_states.carried,
               base2=True, declares=RUNNING),
        Member("delta-column", "dP - delta inside the matrix product", forward_states.fresh,
               way=BackwardWay(delta_column=True)),
        Member("normalised-p", "P divided by the sum over all keys, then rounded",
               forward_two_pass.normalised_p, declares={"p_relative_to": "lse"}),
        Member("normalised-p-blocks", "P divided by the block's sum, then rounded; merged by (o, lse)",
               forward_normalised.normalised_blocks,
               declares=NORMALISED | {"p_relative_to": "block_lse"}),
        Member("random-dq-order", "dq added in a random order, as atomic additions are", forward_states.fresh,
               64, way=BackwardWay(64, 64, random_order=True)),
        Member("unrounded-delta", "delta of o before o is rounded", forward_states.fresh,
               unrounded_delta=True),
        *(tiled("fresh", forward_states.fresh, sizes) for sizes in (16, 64, 128, UNEVEN)),
        *(tiled("carried", forward_states.carried, sizes) for sizes in (16, 64, 128, UNEVEN)),
    )
}  # fmt: skip


def forward_of(member: Member, ring: Ring) -> Outputs:
    """o and natural lse of each worker, not rounded."""
    return member.forward(ring, member.sizes)


def both_passes(
    member: Member,
    ring: Ring,
    dy: list[NDArray],
    dlse: list[NDArray] | None = None,
    format: str | None = None,
) -> dict[str, list[NDArray]]:
    """o, lse and all gradients. ``format``: what o is rounded to before delta is made of it."""
    o, lse = forward_of(member, ring)
    saved = o if format is None or member.unrounded_delta else [narrowed(x, format) for x in o]
    delta = [delta_of(a, b) for a, b in zip(dy, saved, strict=True)]
    return {"o": o, "lse": lse} | backward(ring, dy, lse, delta, dlse, member.way)
