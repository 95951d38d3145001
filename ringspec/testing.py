"""Assertions for test files and notebooks.

:func:`check` runs the conformance suite on a target. :func:`assert_ring_attention` compares given tensors with
ring attention; call it from your own tests.

The expected values are those of dense attention (:mod:`ringspec.spec.dense_forward` and
:mod:`~ringspec.spec.dense_backward`). :mod:`ringspec.compare.bounds` computes the largest accepted errors.

>>> import numpy as np
>>> from ringspec.rings.ring import ring
>>> q = k = v = dy = np.arange(32.0).reshape(1, 1, 16, 2) % 5 / 4
>>> run = ring(q, k, v, dy=dy, workers=4, layout="zigzag", causal=True)
>>> got = {"o": run.o, "dq": run.dq, "dk": run.dk, "dv": run.dv}
>>> options = dict(workers=4, layout="zigzag", causal=True, recipe="float64")
>>> assert_ring_attention(got, q, k, v, dy, **options)
>>> assert_ring_attention(got | {"dk": run.dv}, q, k, v, dy, **options)
Traceback (most recent call last):
AssertionError: W = 4, zigzag, causal, recipe float64, against exact values: mismatch
  dk of worker 0: ...
  diagnosis: ...
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.compare.bounds import Sizes, bound_factors, bound_floors
from ringspec.compare.explain import explain_all
from ringspec.compare.verdict import TensorVerdict, judge_tensor
from ringspec.conformance.diagnose.given import diagnosis_of
from ringspec.conformance.run.check import Checked, check
from ringspec.conformance.target.conventions import to_numpy
from ringspec.errors import DtypeError, OptionError, ShapeError, nearest, shown
from ringspec.formats import holds, load, name_of, narrower, round_to, store
from ringspec.problem.model import Problem
from ringspec.problem.options import check as check_problem
from ringspec.recipes import Recipe
from ringspec.recipes import recipe as recipe_of
from ringspec.rings.layouts import make_layout
from ringspec.spec.layout import Layout
from ringspec.truth.expected import Expected, expected_of
from ringspec.truth.problem import Upstream
from ringspec.truth.sharded import Tables, per_worker, slots_of, tables_for

__all__ = ["Checked", "assert_ring_attention", "check"]

RESULTS = ("o", "lse", "dq", "dk", "dv", "dsinks", "dbias")
GRADIENTS = ("dq", "dk", "dv")
OVER_ROWS = {"dsinks": "sinks", "dbias": "bias"}
OF_KEYS = ("k", "v", "dk", "dv")
LSE_BASES = ("natural", "base2")
INPUTS = {"q": 4, "k": 4, "v": 4, "dy": 4, "dlse": 3}  # number of axes


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
    lse: str = "natural",
    dlse: Any = None,
    diagnose: bool = True,
    **options: Any,
) -> None:
    """Raise AssertionError, with a diagnosis, unless ``got`` is the result of ring attention.

    ``got``      the results to check: o alone, or a mapping from names (o, lse, dq, dk, dv, dsinks, dbias) to
                 arrays. o is required without ``dy``, and dq, dk, dv are required with it.
    ``q``        [B, H, Sq, D], ``k`` [B, Hkv, Sk, D], ``v`` [B, Hkv, Sk, Dv], ``dy`` [B, H, Sq, Dv]: the
                 inputs, and the upstream gradient from which the gradients in ``got`` were computed
    ``workers``  W, the number of workers
    ``layout``   'contiguous', 'striped', 'zigzag', 'zigzag_per_document' or a table [W, n] of tokens
    ``recipe``   the number formats of the kernel (:data:`ringspec.RECIPES`), which determine the largest accepted
                 errors and the dtypes of results
    ``lse``      'natural', or 'base2' for a kernel that returns lse to base 2
    ``dlse``     [B, H, Sq], the upstream gradient of the natural lse; None: 0
    ``diagnose`` True: if results are wrong, compare them with every known bug, which takes seconds (not done if
                 B * H * Sq * Sk > 2**19). False: skip this, to save time if many mismatches are expected
    ``options``  those of :func:`ringspec.attention`: causal, window, scale, softcap, cu_seqlens, sinks...

    Each input and result is a NumPy, PyTorch or JAX array of any float dtype: one array in token order, or a list of W
    arrays (or a stack [W, ...]), each with the tokens of one worker in the order of the layout. Two gradients are sums
    over queries: dsinks, and dbias if all queries share the bias. Pass such a gradient as one array in the shape of
    sinks or bias, which is the whole sum, or as a list with the contribution of each worker.

    Every element of every worker is compared: with exact values if the problem is small, otherwise with float64
    values (the error text says which). The dtype of a result may be wider than the recipe's. A dtype that cannot
    hold the recipe's numbers, such as float16 under 'float32', is reported as 'wrong dtype'.

    Raises OptionError for an unknown name in ``got``, and another :class:`~ringspec.errors.RingspecError`
    for invalid inputs. Inputs that the recipe's input format cannot hold exactly are invalid, because the
    kernel would round them and compute with other numbers.
    """
    used = recipe_of(recipe)
    if lse not in LSE_BASES:
        raise OptionError(
            "the base of lse, 'natural' or 'base2'",
            shown(lse),
            nearest(str(lse), LSE_BASES),
            code="unknown-name",
        )
    options = {name: to_numpy(x) if hasattr(x, "shape") else x for name, x in options.items()}
    results = _results_of(got, dy is not None, options)
    cu = options.get("cu_seqlens")
    cu_k = cu if options.get("cu_seqlens_k") is None else options["cu_seqlens_k"]
    for_q, for_k = layout if isinstance(layout, tuple) and len(layout) == 2 else (layout, layout)
    sides = {name: (for_k, cu_k) if name in OF_KEYS else (for_q, cu) for name in INPUTS}
    given = {"q": q, "k": k, "v": v, "dy": dy, "dlse": dlse}
    whole = {
        name: _gathered(name, x, workers, *sides[name], used)
        for name, x in given.items()
        if x is not None
    }
    problem = check_problem(whole["q"], whole["k"], whole["v"], options)
    tables = tables_for(problem, layout, workers, options)
    _check_upstream(problem, whole)
    upstream = Upstream(whole.get("dy"), whole.get("dlse"))
    truth = expected_of(problem, upstream, tables)
    judge = Judge(problem, truth, tables, used, whole, options, lse)
    verdicts = [one for name, x in results.items() for one in judge.verdicts(name, x)]
    if any(not one.ok for one in verdicts):
        bug: list[str] = []
        if diagnose:
            name = layout if isinstance(layout, str) else "table"
            outputs = judge.outputs(results, verdicts)
            failing = {one.tensor for one in verdicts if not one.ok}
            bug = diagnosis_of(problem, upstream, tables, name, used, options, outputs, failing)
        raise AssertionError(_told(verdicts, judge, workers, layout, options, bug))


def _results_of(got: Any, with_gradients: bool, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results by name; raise OptionError if a name is unknown, missing or not expected."""
    results = dict(got) if isinstance(got, Mapping) else {"o": got}
    for name in results:
        if name not in RESULTS:
            raise OptionError(
                "the name of a result", shown(name), nearest(name, RESULTS), code="unknown-name"
            )
    results = {name: results[name] for name in RESULTS if results.get(name) is not None}
    for name in GRADIENTS if with_gradients else ("o",):
        if name not in results:
            raise OptionError(
                f"{name} in got", "no such tensor", f"pass {name} as the kernel returns it"
            )
    extra = [name for name in (*GRADIENTS, *OVER_ROWS) if name in results and not with_gradients]
    if extra:
        raise OptionError(
            f"dy together with {extra[0]}", "no dy", "pass the dy from which it was computed"
        )
    for name, of in OVER_ROWS.items():
        if name in results and options.get(of) is None:
            raise OptionError(f"{of} together with {name}", f"no {of}", f"pass {of}=")
    return results


def _shards_of(x: Any, workers: int, name: str, rank: int) -> list[NDArray] | NDArray:
    """Return a list of one array per worker if ``x`` is a list or a stack of these, otherwise one array."""
    if isinstance(x, (list, tuple)) and len(x) == workers and np.ndim(x[0]) == rank:
        return [to_numpy(one, name) for one in x]
    array = to_numpy(x, name)
    if array.ndim == rank + 1 and len(array) == workers:
        return list(array)
    return array


def _gathered(
    name: str, x: Any, workers: int, layout: Any, cu_seqlens: Any, recipe: Recipe
) -> NDArray[np.float64]:
    """Return an input in token order, in float64; refuse values that the recipe would round."""
    rank = INPUTS[name]
    shards = _shards_of(x, workers, name, rank)
    if isinstance(shards, list):
        loaded = [_number(name, one) for one in shards]
        table = _table_for(loaded, workers, layout, cu_seqlens, rank)
        if any(one.ndim != rank or one.shape[2] != table.shape[1] for one in loaded):
            raise ShapeError(
                f"{name} of each worker with {table.shape[1]} tokens on axis 2",
                ", ".join(str(one.shape) for one in loaded[:4]),
                "pass [B, H, n, D] of each worker, in slot order",
            )
        first = loaded[0].shape
        values = np.zeros((*first[:2], int((table >= 0).sum()), *first[3:]))
        for one, tokens in zip(loaded, table, strict=True):
            values[:, :, tokens[tokens >= 0]] = one[:, :, tokens >= 0]
    else:
        values = _number(name, shards)
    if name != "dlse" and not (round_to(values, recipe.inputs) == values).all():
        raise OptionError(
            f"values of {name} that {recipe.inputs}, the input format of recipe {recipe.name}, can hold",
            f"values that {recipe.inputs} rounds",
            f"round {name} to {recipe.inputs} first, or pass the recipe of its format",
        )
    return values


def _number(name: str, x: NDArray) -> NDArray[np.float64]:
    if name_of(x.dtype) is None:
        raise DtypeError(f"{name} of a float dtype", str(x.dtype), "convert it to a float dtype")
    return load(x, name)


def _table_for(
    shards: list[NDArray[np.float64]], workers: int, layout: Any, cu_seqlens: Any, rank: int
) -> NDArray[np.int64]:
    """Return the layout table [W, n] of the ``shards``: the token in each slot.

    The table needs the number of tokens. Under 'zigzag_per_document' shards may contain padding, so the number is the
    last entry of ``cu_seqlens``.
    """
    length = sum(one.shape[2] if one.ndim == rank else 0 for one in shards)
    if isinstance(layout, str) and layout == "zigzag_per_document" and cu_seqlens is not None:
        length = int(np.asarray(cu_seqlens)[-1])
    elif not isinstance(layout, str):
        table = layout.table if isinstance(layout, Layout) else np.asarray(layout)
        length = int((table >= 0).sum())
    return make_layout(layout, length, workers, cu_seqlens).table


def _check_upstream(problem: Problem, given: Mapping[str, NDArray[np.float64]]) -> None:
    rows = problem.q.shape[:3]
    for name, due in (("dy", (*rows, problem.v.shape[3])), ("dlse", rows)):
        if name in given and given[name].shape != due:
            what = "o" if name == "dy" else "lse"
            raise ShapeError(
                f"{name} of shape {due}", f"{given[name].shape}", f"pass the gradient of {what}"
            )


class Judge:
    """Compare results with the expected values of each worker, within the largest errors that the recipe permits."""

    def __init__(
        self,
        problem: Problem,
        truth: Expected,
        tables: Tables,
        recipe: Recipe,
        inputs: Mapping[str, NDArray[np.float64]],
        options: Mapping[str, Any],
        lse: str,
    ) -> None:
        self.problem, self.truth, self.recipe, self.lse = problem, truth, recipe, lse
        self.held, self.scales = (per_worker(x, tables, 0.0) for x in (truth.values, truth.scale))
        self.tables = {"q": tables.q, "k": tables.k}
        self.given = {
            name: np.asarray(options[of]) for name, of in OVER_ROWS.items() if of in options
        }
        self.notes: dict[tuple[str, str], str] = {}
        sizes = _sizes_of(problem, truth, tables.workers)
        largest = {name: float(np.abs(x).max(initial=0.0)) for name, x in inputs.items()}
        largest |= {"scale": abs(problem.terms.scale)}
        largest |= {"dropout": 1.0 / (1.0 - problem.terms.dropout_p)}
        self.factors, self.floors = {}, {}
        for name in RESULTS:
            due = {"outputs": self.due(name), "statistics": self.due(name)}
            self.factors[name] = bound_factors(recipe, sizes, **due)[name]
            self.floors[name] = bound_floors(recipe, sizes, largest, **due)[name]

    def due(self, name: str) -> str:
        """Return the required format of a result.

        It is that of the recipe or, for dsinks and dbias, that of sinks or bias if this is narrower.
        """
        own = {"o": self.recipe.outputs, "lse": self.recipe.lse, "dsinks": self.recipe.lse}
        due = own.get(name, self.recipe.gradients)
        parameter = name_of(self.given[name].dtype) if name in self.given else None
        return due if parameter is None else narrower(due, parameter)

    def verdicts(self, name: str, x: Any) -> Sequence[TensorVerdict]:
        """Return one verdict per worker, or a single verdict for a sum over all workers."""
        table = self.tables["k" if name in OF_KEYS else "q"]
        rank = self.given[name].ndim if name in self.given else 3 if name == "lse" else 4
        shards = _shards_of(x, len(table), name, rank)
        want, scale = self.truth.values[name], self.truth.scale[name]
        is_sum = f"{name}_sum" in self.held
        if not isinstance(shards, list):
            shape = self.given[name].shape if name in self.given else want.shape
            if shards.shape != shape:
                return [TensorVerdict(name, worker, "wrong shape") for worker in range(len(table))]
            whole = _as_whole(name, shards)
            if is_sum:
                return [self.verdict(f"{name}_sum", 0, whole, want, scale, None)]
            shards = list(slots_of(whole, table, 2, 0.0))
        padding = [None if is_sum else slots < 0 for slots in table]
        local = (_as_whole(name, one) for one in shards)
        given = zip(local, self.held[name], self.scales[name], padding, strict=True)
        return [self.verdict(name, worker, *rest) for worker, rest in enumerate(given)]

    def outputs(
        self, results: Mapping[str, Any], verdicts: Sequence[TensorVerdict]
    ) -> dict[str, tuple[NDArray, ...]]:
        """Return o, lse, dq, dk and dv as one array per worker; omit results with a wrong shape or dtype."""
        formless = {one.tensor for one in verdicts if one.kind in ("wrong shape", "wrong dtype")}
        outputs = {}
        for name in ("o", "lse", *GRADIENTS):
            if name not in results or name in formless:
                continue
            table = self.tables["k" if name in OF_KEYS else "q"]
            shards = _shards_of(results[name], len(table), name, 3 if name == "lse" else 4)
            if not isinstance(shards, list):
                shards = list(slots_of(shards, table, 2, 0.0))
            if name == "lse" and self.lse == "base2":
                shards = [load(x) * math.log(2.0) for x in shards]
            outputs[name] = tuple(shards)
        return outputs

    def verdict(
        self,
        tensor: str,
        worker: int,
        got: NDArray,
        want: NDArray,
        scale: NDArray,
        padding: NDArray[np.bool_] | None,
    ) -> TensorVerdict:
        name = tensor.removesuffix("_sum")
        storage, due = name_of(got.dtype), self.due(name)
        if storage is None or not holds(storage, due):
            self.notes[name, str(got.dtype)] = (
                f"{name} has dtype {got.dtype}; recipe {self.recipe.name} requires {due} or wider"
            )
            return TensorVerdict(tensor, worker, "wrong dtype")
        if name == "lse" and self.lse == "base2":
            got, storage = load(got) * math.log(2.0), "float64"
        factor, floor = self.factors[name], self.floors[name]
        return judge_tensor(
            tensor,
            got,
            want,
            store(want, storage),
            scale,
            factor,
            padding,
            floor=floor,
            worker=worker,
        )


def _sizes_of(problem: Problem, truth: Expected, workers: int) -> Sizes:
    batch, heads, queries, width = problem.q.shape
    lse = truth.values["lse"]
    return Sizes(
        workers=workers,
        keys=problem.k.shape[2],
        head_dim=width,
        value_dim=problem.v.shape[3],
        queries=queries * problem.terms.group,
        batch=batch * heads,
        softcap=problem.terms.softcap is not None,
        condition=float(truth.scale["lse"].max(initial=0.0)),
        largest_lse=float(np.abs(lse[np.isfinite(lse)]).max(initial=0.0)),
    )


def _as_whole(name: str, x: NDArray) -> NDArray:
    """Reshape dsinks to [H, N] and dbias to [B|1, H|1, n|1, Sk|1], whatever the shape of sinks and bias.

    >>> _as_whole("dbias", np.zeros((5, 7))).shape, _as_whole("dsinks", np.zeros(4)).shape
    ((1, 1, 5, 7), (4, 1))
    """
    if name == "dsinks" and x.ndim == 1:
        return x[:, None]
    return x.reshape((1,) * (4 - x.ndim) + x.shape) if name == "dbias" and x.ndim < 4 else x


def _told(
    verdicts: Sequence[TensorVerdict],
    judge: Judge,
    workers: int,
    layout: Any,
    options: Mapping[str, Any],
    diagnosis: Sequence[str] = (),
) -> str:
    """Return the error text: what was compared, where it differs, and the diagnosis."""
    names = [name for name, value in options.items() if value is not None and value is not False]
    words = [f"W = {workers}", layout if isinstance(layout, str) else "a layout table", *names]
    words += [
        f"recipe {judge.recipe.name}",
        f"against {judge.truth.source.removesuffix(' values')} values",
    ]
    lines = [*explain_all(verdicts).splitlines(), *judge.notes.values()]
    lines += [f"{'  ' if n else 'diagnosis: '}{line}" for n, line in enumerate(diagnosis)]
    return f"{', '.join(words)}: mismatch\n  " + "\n  ".join(lines)
