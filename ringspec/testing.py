"""An assertion for test files that exist already: is this what a ring of W workers must give?

>>> import numpy as np
>>> from ringspec.spec.ring import ring
>>> q = k = v = dy = np.arange(32.0).reshape(1, 1, 16, 2) % 5 / 4
>>> run = ring(q, k, v, dy=dy, workers=4, layout="zigzag", causal=True)
>>> got = {"o": run.o, "dq": run.dq, "dk": run.dk, "dv": run.dv}
>>> options = dict(workers=4, layout="zigzag", causal=True, recipe="float64")
>>> assert_ring_attention(got, q, k, v, dy, **options)
>>> assert_ring_attention(got | {"dk": run.dv}, q, k, v, dy, **options)
Traceback (most recent call last):
AssertionError: W = 4, zigzag, causal, recipe float64, against exact values: mismatch
  dk of worker 0: ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.compare.bounds import Sizes, bound_factors, bound_floors
from ringspec.compare.explain import explain_all
from ringspec.compare.verdict import TensorVerdict, judge_tensor
from ringspec.conformance.conventions import to_numpy
from ringspec.conformance.dense import Dense, truth_of
from ringspec.errors import DtypeError, OptionError, ShapeError, UnknownNameError, nearest, shown
from ringspec.formats import load, name_of, round_to, store
from ringspec.recipes import Recipe
from ringspec.recipes import recipe as recipe_of
from ringspec.spec.layout import Layout, make_layout
from ringspec.spec.options import check
from ringspec.spec.problem import Problem
from ringspec.spec.ring import layouts_for
from ringspec.vectors.ringwise import slots_of

__all__ = ["assert_ring_attention"]

RESULTS = ("o", "lse", "dq", "dk", "dv")
GRADIENTS = ("dq", "dk", "dv")
OF_KEYS = ("k", "v", "dk", "dv")
RANK = {"lse": 3}


def assert_ring_attention(
    got: Any,
    q: Any,
    k: Any,
    v: Any,
    dy: Any = None,
    *,
    workers: int,
    layout: Any = "contiguous",
    recipe: str | Recipe = "bf16",
    **options: Any,
) -> None:
    """Raises AssertionError, with the report's text, unless ``got`` is ring attention.

    ``got``      a mapping of some of o, lse, dq, dk, dv, or o alone
    ``q``        [B, H, Sq, D], ``k`` [B, Hkv, Sk, D], ``v`` [B, Hkv, Sk, Dv], ``dy`` like o: the
                 upstream gradient with which the gradients were made
    ``workers``  W; ``layout``: 'contiguous', 'striped', 'zigzag', 'zigzag_per_document' or a table
                 [W, n] of tokens
    ``recipe``   how the kernel computes (:data:`ringspec.RECIPES`); it decides the bounds
    ``options``  those of :func:`ringspec.attention`: causal, window, scale, softcap, cu_seqlens, sinks...

    Each of the tensors, in and out, is a NumPy, PyTorch or JAX array of any float dtype: gathered in
    the order of the tokens, or a list of W arrays in slot order (a stack [W, ...] is one as well).
    The lse is natural. Every worker's every element is compared: with the exact values for small
    problems, else with float64 (the text says which).

    Raises :class:`~ringspec.errors.RingspecError` for inputs that make no problem, and for ones that
    the recipe's input format cannot hold: then the kernel rounded them, and saw other numbers.
    """
    used = recipe_of(recipe)
    results = results_of(got, dy is not None)
    cu = options.get("cu_seqlens")
    cu_k = cu if options.get("cu_seqlens_k") is None else options["cu_seqlens_k"]
    for_q, for_k = layout if isinstance(layout, tuple) and len(layout) == 2 else (layout, layout)
    sides = {"q": (for_q, cu), "dy": (for_q, cu), "k": (for_k, cu_k), "v": (for_k, cu_k)}
    given = {"q": q, "k": k, "v": v} | ({} if dy is None else {"dy": dy})
    whole = {name: gathered(name, x, workers, *sides[name], used) for name, x in given.items()}
    problem = check(whole["q"], whole["k"], whole["v"], options)
    layouts = layouts_for(problem, layout, workers, options)
    check_dy(problem, whole.get("dy"))
    truth = truth_of(problem, whole.get("dy"))
    judge = Judge(problem, truth, layouts, used, whole)
    verdicts = [one for name, x in results.items() for one in judge.verdicts(name, x)]
    if any(not one.ok for one in verdicts):
        raise AssertionError(told(verdicts, workers, layout, used, options, truth))


def results_of(got: Any, with_gradients: bool) -> dict[str, Any]:
    """The tensors by name; whatever ``dy`` asks for must be there."""
    results = dict(got) if isinstance(got, Mapping) else {"o": got}
    for name in results:
        if name not in RESULTS:
            raise UnknownNameError("a name of a result", shown(name), nearest(name, RESULTS))
    needed = GRADIENTS if with_gradients else ("o",)
    for name in needed:
        if results.get(name) is None:
            raise OptionError(f"{name} in what is tested", "none", "pass what the kernel gives")
    extra = [name for name in GRADIENTS if name in results and not with_gradients]
    if extra:
        raise OptionError(f"dy beside {extra[0]}", "none", "pass the dy that it was made with")
    return {name: results[name] for name in RESULTS if results.get(name) is not None}


def shards_of(name: str, x: Any, workers: int) -> list[NDArray] | NDArray:
    """One array a worker where that is what came, else the gathered array."""
    rank = RANK.get(name, 4)
    if isinstance(x, (list, tuple)) and len(x) == workers and np.ndim(x[0]) == rank:
        return [to_numpy(one, name) for one in x]
    array = to_numpy(x, name)
    if array.ndim == rank + 1 and len(array) == workers:
        return list(array)
    return array


def gathered(
    name: str, x: Any, workers: int, layout: Any, cu_seqlens: Any, recipe: Recipe
) -> NDArray[np.float64]:
    """An input in the order of the tokens, in float64, its values those that the kernel saw."""
    shards = shards_of(name, x, workers)
    if isinstance(shards, list):
        loaded = [number(name, one) for one in shards]
        table = table_for(loaded, workers, layout, cu_seqlens)
        if any(one.ndim != 4 or one.shape[2] != table.shape[1] for one in loaded):
            raise ShapeError(
                f"{name} of each worker with {table.shape[1]} tokens on axis 2",
                ", ".join(str(one.shape) for one in loaded[:4]),
                "pass [B, H, n, D] of each worker, in slot order",
            )
        values = np.zeros((*loaded[0].shape[:2], int((table >= 0).sum()), loaded[0].shape[3]))
        for one, tokens in zip(loaded, table, strict=True):
            values[:, :, tokens[tokens >= 0]] = one[:, :, tokens >= 0]
    else:
        values = number(name, shards)
    if not (round_to(values, recipe.inputs) == values).all():
        raise OptionError(
            f"{name} that {recipe.inputs} holds, because the recipe is {recipe.name}",
            "values that it rounds",
            f"round {name} to {recipe.inputs} first, or pass the recipe of its own format",
        )
    return values


def number(name: str, x: NDArray) -> NDArray[np.float64]:
    if name_of(x.dtype) is None:
        raise DtypeError(f"{name} of a float dtype", str(x.dtype), "convert it")
    return load(x, name)


def table_for(
    shards: list[NDArray[np.float64]], workers: int, layout: Any, cu_seqlens: Any
) -> NDArray[np.int64]:
    """Which token each slot holds. Padded documents end where ``cu_seqlens`` does."""
    length = sum(one.shape[2] if one.ndim == 4 else 0 for one in shards)
    if isinstance(layout, str) and layout == "zigzag_per_document" and cu_seqlens is not None:
        length = int(np.asarray(cu_seqlens)[-1])
    elif not isinstance(layout, str):
        table = layout.table if isinstance(layout, Layout) else np.asarray(layout)
        length = int((table >= 0).sum())
    return make_layout(layout, length, workers, cu_seqlens).table


def check_dy(problem: Problem, dy: NDArray[np.float64] | None) -> None:
    due = (*problem.q.shape[:3], problem.v.shape[3])
    if dy is not None and dy.shape != due:
        raise ShapeError(f"dy of shape {due}", f"{dy.shape}", "pass the gradient of o")


class Judge:
    """The truth dealt to the workers, and the bounds of the recipe."""

    def __init__(
        self,
        problem: Problem,
        truth: Dense,
        layouts: tuple[Layout, Layout],
        recipe: Recipe,
        inputs: Mapping[str, NDArray[np.float64]],
    ) -> None:
        batch, heads, queries, width = problem.q.shape
        sizes = Sizes(
            workers=layouts[0].workers,
            keys=problem.k.shape[2],
            head_dim=width,
            value_dim=problem.v.shape[3],
            queries=queries * problem.terms.group,
            batch=batch * heads,
            softcap=problem.terms.softcap is not None,
        )
        largest = {name: float(np.abs(x).max(initial=0.0)) for name, x in inputs.items()}
        largest |= {"scale": abs(problem.terms.scale)}
        largest |= {"dropout": 1.0 / (1.0 - problem.terms.dropout_p)}
        self.truth, self.tables = truth, {"q": layouts[0].table, "k": layouts[1].table}
        self.factors = bound_factors(recipe, sizes)
        self.floors = bound_floors(recipe, sizes, largest)

    def verdicts(self, name: str, x: Any) -> Sequence[TensorVerdict]:
        """One verdict a worker."""
        table = self.tables["k" if name in OF_KEYS else "q"]
        workers = len(table)
        want = self.truth.values[name]
        dealt, scale = (slots_of(y, table, 2, 0.0) for y in (want, getattr(self.truth.scale, name)))
        shards = shards_of(name, x, workers)
        if not isinstance(shards, list):
            if shards.shape != want.shape:
                return [TensorVerdict(name, worker, "wrong shape") for worker in range(workers)]
            shards = list(slots_of(shards, table, 2, 0.0))
        return [
            self.verdict(
                name, worker, shards[worker], dealt[worker], scale[worker], table[worker] < 0
            )
            for worker in range(workers)
        ]

    def verdict(
        self,
        name: str,
        worker: int,
        got: NDArray,
        want: NDArray,
        scale: NDArray,
        padding: NDArray[np.bool_],
    ) -> TensorVerdict:
        storage = name_of(got.dtype)
        if storage is None:
            return TensorVerdict(name, worker, "wrong dtype")
        rounded = store(want, storage)
        factor, floor = self.factors[name], self.floors[name]
        return judge_tensor(
            name, got, want, rounded, scale, factor, padding, floor=floor, worker=worker
        )


def told(
    verdicts: Sequence[TensorVerdict],
    workers: int,
    layout: Any,
    recipe: Recipe,
    options: Mapping[str, Any],
    truth: Dense,
) -> str:
    """What was compared, and where it differs."""
    names = [name for name, value in options.items() if value is not None and value is not False]
    words = [f"W = {workers}", layout if isinstance(layout, str) else "a layout table"]
    words += [*names, f"recipe {recipe.name}", f"against {truth.source} values"]
    listed = explain_all(verdicts).replace("\n", "\n  ")
    return f"{', '.join(words)}: mismatch\n  {listed}"
