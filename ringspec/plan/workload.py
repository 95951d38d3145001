"""The attention layer for which a ring is planned: its lengths, heads, mask and number formats, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ringspec.errors import LayoutError, OptionError, ShapeError, nearest, shown
from ringspec.plan.pairs import Band, band
from ringspec.problem.checks import check_window, flag, integer, is_integer
from ringspec.problem.model import Columns, Problem, Rows, Terms
from ringspec.problem.options import default_scale
from ringspec.recipes import Recipe, recipe
from ringspec.spec.schedule import CIRCULATIONS

PLANNED_LAYOUTS = ("contiguous", "striped", "zigzag")
LARGEST_PLAN = 1 << 20
# The sum over the workers of one step, W n n, stays below this, so it fits in int64.
LARGEST_STEP = 1 << 62
LARGEST_SHAPE = 1 << 20


@dataclass(frozen=True)
class Workload:
    """The attention of one layer on a ring.

    ``length`` S: number of tokens. ``workers`` W. ``batch`` B, ``heads`` H, ``kv_heads`` Hkv, ``head_dim`` D and
    ``value_dim`` Dv: the shapes of the tensors. ``causal`` and ``window`` = (left, right) define the mask, as in
    ``ringspec.attention``. ``recipe``: the number formats, which determine how many bytes a value has in memory and on
    the link.
    """

    length: int
    workers: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    causal: bool
    window: tuple[int | None, int | None] | None
    recipe: Recipe

    @property
    def tokens(self) -> int:
        """The number n of tokens on each worker."""
        return self.length // self.workers

    @property
    def copies(self) -> int:
        """The number B * H of query heads in the batch."""
        return self.batch * self.heads

    @property
    def mask(self) -> Band:
        """The mask, as the range of visible differences between the positions of query and key."""
        return band(self.length, self.causal, self.window)

    def resized(self, workers: int, tokens: int) -> Workload:
        """Return the same layer on ``workers`` workers with ``tokens`` tokens each."""
        return Workload(
            workers * tokens, workers, self.batch, self.heads, self.kv_heads, self.head_dim,
            self.value_dim, self.causal, self.window, self.recipe,
        )  # fmt: skip

    def flops(self, backward: bool) -> int:
        """Count the operations of the matrix products for one visible pair of one head, in one pass.

        The forward pass has 2 D + 2 Dv for Q K^T and P V. The backward pass has 6 D + 4 Dv for Q K^T again, dP, dV, dQ
        and dK. With D = Dv these are 4 D and 10 D, as in Dao, https://arxiv.org/abs/2307.08691, section 4.1.
        """
        if backward:
            return 6 * self.head_dim + 4 * self.value_dim
        return 2 * self.head_dim + 2 * self.value_dim

    def one_token(self) -> Problem:
        """Return a problem of one token in the shapes of this layer, to count bytes; its tensors take no memory."""
        shape = (self.batch, self.heads, 1, self.head_dim)
        keys = (self.batch, self.kv_heads, 1, self.head_dim)
        values = (self.batch, self.kv_heads, 1, self.value_dim)
        zero, first = np.zeros(()), np.zeros(1, dtype=np.int64)
        terms = Terms(
            self.heads, self.kv_heads, default_scale(self.head_dim), self.causal, self.window
        )
        q, k, v = (np.broadcast_to(zero, s) for s in (shape, keys, values))
        return Problem(q, k, v, Rows(first, first[None]), Columns(first, first[None]), terms)


def workload(
    length: Any,
    workers: Any,
    *,
    batch: Any = 1,
    heads: Any = 32,
    kv_heads: Any = None,
    head_dim: Any = 128,
    value_dim: Any = None,
    causal: Any = True,
    window: Any = None,
    recipe_name: Any = "bf16",
) -> Workload:
    """Check the arguments and return the :class:`Workload`.

    Raises OptionError, LayoutError or ShapeError for the first argument that is not valid.

    >>> workload(1 << 20, 64, kv_heads=8).tokens
    16384
    """
    if not is_integer(workers) or not 1 <= workers <= LARGEST_PLAN:
        raise LayoutError(
            f"W >= 1 workers, and at most {LARGEST_PLAN}",
            shown(workers),
            "pass workers=1 or more",
            code="worker-count",
        )
    length = sized(length, "length", 1 << 62)
    heads = sized(heads, "heads")
    kv_heads = heads if kv_heads is None else sized(kv_heads, "kv_heads")
    if heads % kv_heads:
        raise ShapeError(
            "query heads H as a multiple of key/value heads Hkv",
            f"H = {heads}, Hkv = {kv_heads}",
            "query head h uses key head h // (H // Hkv)",
            code="head-count",
        )
    head_dim = sized(head_dim, "head_dim")
    planned = Workload(
        length,
        int(workers),
        sized(batch, "batch"),
        heads,
        kv_heads,
        head_dim,
        head_dim if value_dim is None else sized(value_dim, "value_dim"),
        flag(causal, "causal"),
        check_window(window),
        recipe(recipe_name),
    )
    if length % planned.workers:
        raise LayoutError(
            f"S divisible by W = {planned.workers}", f"S = {length}", "pad the sequence"
        )
    if planned.workers * planned.tokens**2 > LARGEST_STEP:
        raise OptionError(
            "W n n of at most 2**62 (W workers with n tokens each)",
            f"W = {planned.workers}, n = {planned.tokens}",
            "choose a shorter sequence, or more workers",
        )
    return planned


def sized(x: Any, what: str, most: int = LARGEST_SHAPE) -> int:
    """Validate a length or a number of heads, an integer from 1 to ``most``, and return it as int."""
    if not 1 <= integer(x, what) <= most:
        raise OptionError(f"{what} from 1 to {most}", shown(x), f"pass {what} in this range")
    return int(x)


def check_choice(names: Any, known: tuple[str, ...], what: str) -> tuple[str, ...]:
    """Validate a name or a list of names, and return the names in the order of ``known``."""
    chosen = (names,) if isinstance(names, str) else names
    if not isinstance(chosen, (tuple, list)) or not chosen:
        raise OptionError(
            f"one or more of {', '.join(known)}", shown(names), f"pass {what}='{known[0]}'"
        )
    for name in chosen:
        if not isinstance(name, str) or name not in known:
            raise OptionError(
                f"{what} in {', '.join(known)}",
                shown(name),
                nearest(name, known),
                code="unknown-name",
            )
    return tuple(name for name in known if name in chosen)


def check_layouts(names: Any, planned: Workload) -> tuple[str, ...]:
    """Validate the requested layouts and return them; None: all layouts that are possible for this layer and ring."""
    even = planned.tokens % 2 == 0
    if names is None:
        return PLANNED_LAYOUTS if even else PLANNED_LAYOUTS[:2]
    chosen = check_choice(names, PLANNED_LAYOUTS, "layouts")
    if "zigzag" in chosen and not even:
        raise LayoutError(
            f"S divisible by 2W = {2 * planned.workers} for the layout 'zigzag'",
            f"S = {planned.length}",
            "pad the sequence, or leave 'zigzag' out",
        )
    return chosen


def check_circulations(names: Any) -> tuple[str, ...]:
    """Validate the requested circulations and return them; None: all circulations."""
    return CIRCULATIONS if names is None else check_choice(names, CIRCULATIONS, "circulations")
