"""Make the inputs of a case from the recipes in its case.json. Any language can compute the same bits.

A random element is an integer times a power of two. The integers of a tensor come from its own SHAKE-128 stream
(FIPS 202), ``SHAKE-128("ringspec|vectors|<seed>|<name>")``, read as little-endian 64-bit words, one for
each element in C order. Nothing is rounded: a value that its storage format cannot represent is an error.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.errors import NonFiniteError, OptionError, ShapeError, nearest, shown
from ringspec.formats import round_to, store
from ringspec.vectors.format.case import KINDS, Case, Patch, TensorRecipe

__all__ = ["draw", "inputs_of"]

LARGEST_TENSOR = 2**23
LARGEST_BITS = 53
LARGEST_OFFSET = 2**60
SMALLEST_EXPONENT, LARGEST_EXPONENT = -1200, 1023

ROWS = ("dlse", "lse", "delta")
PAIRS = ("bias", "mask", "keep")
QUERY_INTEGERS = ("segments_q", "bound_min", "bound_max", "positions_q")
KEY_INTEGERS = ("segments_k", "positions_k")
INTEGERS = QUERY_INTEGERS + KEY_INTEGERS
BOOLEANS = ("mask", "keep")
NARROW = ("q", "k", "v", "dy", "parts_o")
PARTS = ("parts_o", "parts_lse", "parts_sum")
WITH_MINUS_INFINITY = ("bias", "lse", "parts_lse")
OPTIONAL = PAIRS + ("sinks",) + INTEGERS
NAMES = ("q", "k", "v", "dy") + ROWS + OPTIONAL + PARTS


def words(seed: str, name: str, count: int) -> NDArray[np.uint64]:
    """Return the first ``count`` 64-bit words of the random stream of one tensor.

    >>> [hex(int(word)) for word in words("merge/two-parts", "parts_o", 1)]
    ['0x76f0044eb8baa5c3']
    """
    stream = hashlib.shake_128(f"ringspec|vectors|{seed}|{name}".encode())
    return np.frombuffer(stream.digest(8 * count), dtype="<u8").astype(np.uint64)


def expected_names(case: Case) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the inputs that a case must have, and the names of the inputs that it may have."""
    if case.operation == "schedule":
        return frozenset(), frozenset()
    if case.operation == "merge":
        return frozenset(PARTS[:2]), frozenset(PARTS[2:])
    must = {"q", "k", "v"}
    may = set(OPTIONAL)
    if "backward" in case.passes:
        must.add("dy")
        if case.operation == "block":
            must |= {"lse", "delta"}
        else:
            may.add("dlse")
    return frozenset(must), frozenset(may)


def shape_of(case: Case, name: str) -> tuple[int, ...]:
    """Return the shape of an input; if the case permits several, such as for a bias, the recipe gives the shape."""
    sizes, recipe = case.shape, case.inputs.tensors[name]
    if sizes is None:
        raise ShapeError("a case with a shape", "null", "give B, H, Hkv, Sq, Sk, D and Dv")
    b, h, n_q, n_k = sizes.B, sizes.H, sizes.Sq, sizes.Sk
    known = {
        "q": (b, h, n_q, sizes.D),
        "k": (b, sizes.Hkv, n_k, sizes.D),
        "v": (b, sizes.Hkv, n_k, sizes.Dv),
        "dy": (b, h, n_q, sizes.Dv),
        "parts_o": (n_k, b, h, n_q, sizes.Dv),
        "parts_lse": (n_k, b, h, n_q),
        "parts_sum": (n_k, b, h, n_q),
    }
    if name in known:
        return agreed(name, known[name], recipe)
    if name in ROWS:
        return agreed(name, (b, h, n_q), recipe)
    given = np.shape(recipe.values or ()) if recipe.shape is None else tuple(recipe.shape)
    if name in PAIRS:
        full = (b, h, n_q, n_k)
        fits = len(given) == 4 and all(n in (1, m) for n, m in zip(given, full, strict=True))
        wanted = f"four axes, each 1 or that of {full}"
    elif name == "sinks":
        fits, wanted = len(given) == 2 and given[0] == h and given[1] >= 1, f"({h}, N)"
    else:
        length = n_q if name in QUERY_INTEGERS else n_k
        fits = given in ((length,), (1, length), (b, length))
        wanted = f"({length},) or ({b}, {length})"
    if not fits:
        raise ShapeError(f"{name} of shape {wanted}", str(given), f"give {name} that shape")
    return given


def agreed(name: str, shape: tuple[int, ...], recipe: TensorRecipe) -> tuple[int, ...]:
    """Return ``shape``; raise an error if the recipe gives another shape."""
    if recipe.shape is not None and tuple(recipe.shape) != shape:
        raise ShapeError(
            f"{name} of shape {shape}", str(recipe.shape), f"leave the shape of {name} out"
        )
    return shape


def head_and_shard_axes(name: str) -> tuple[int | None, int | None]:
    """Return the axes to which a recipe's offsets ``head`` and ``shard`` apply; None if an input has no such axis.

    ``shard`` applies to the token axis of q, k, v, dy and other inputs with a token axis, to the key axis of bias, mask
    and keep, and to the first axis of parts_o, parts_lse and parts_sum, which counts the partial results.
    """
    if name in PARTS:
        return 2, 0
    if name == "sinks":
        return 0, None
    if name in INTEGERS:
        return None, None
    return 1, 3 if name in PAIRS else 2


def draw(name: str, shape: tuple[int, ...], recipe: TensorRecipe, seed: str) -> NDArray:
    """Make one tensor from its recipe: float64, int64 (:data:`INTEGERS`) or bool (:data:`BOOLEANS`).

    ``name``: the name of the input. ``shape``: any shape. ``seed`` selects the random words.

    Raises :class:`~ringspec.errors.OptionError` for an unknown name or if a value in the recipe is out of range, and
    :class:`~ringspec.errors.ShapeError` if the tensor is too large or the values in the recipe have another shape.

    >>> recipe = TensorRecipe("uniform", bits=6, exponent=-4, head=8)
    >>> draw("q", (1, 2, 1, 3), recipe, "readme").ravel().tolist()
    [-1.25, -0.8125, 1.375, 2.125, -0.6875, 1.4375]
    """
    if name not in NAMES:
        raise OptionError(
            "the name of an input", shown(name), nearest(name, NAMES), code="unknown-name"
        )
    if not math.prod(shape) <= LARGEST_TENSOR:
        raise ShapeError(
            f"at most {LARGEST_TENSOR} elements in {name}", str(shape), "make the tensor smaller"
        )
    x = made(name, shape, recipe, seed)
    for patch in recipe.patches:
        apply_patch(x, patch, name)
    return x


def made(name: str, shape: tuple[int, ...], recipe: TensorRecipe, seed: str) -> NDArray:
    """Make a tensor from its recipe, without applying the recipe's patches."""
    if recipe.kind == "values":
        return from_values(name, shape, recipe.values)
    if recipe.kind == "constant":
        return from_values(name, (), recipe.value) + np.zeros(shape, dtype=dtype_of(name))
    if recipe.kind not in KINDS:
        raise OptionError(
            "a kind of recipe", shown(recipe.kind), nearest(recipe.kind, KINDS), code="unknown-name"
        )
    if (recipe.kind == "bernoulli") != (name in BOOLEANS) or name in INTEGERS:
        raise OptionError(
            f"a recipe that makes {dtype_of(name)} for {name}",
            f"kind {recipe.kind!r}",
            "use 'bernoulli' for mask and keep, 'uniform' for floats, 'values' for integers",
        )
    bits = words(seed, name, math.prod(shape)).reshape(shape)
    if recipe.kind == "bernoulli":
        threshold = in_range(recipe.threshold, 0, 256, f"threshold of {name}")
        return (bits >> np.uint64(56)) >= np.uint64(threshold)
    return uniform(name, bits, recipe)


def uniform(name: str, bits: NDArray[np.uint64], recipe: TensorRecipe) -> NDArray[np.float64]:
    """Compute the recipe ``uniform`` (:class:`~ringspec.vectors.format.case.TensorRecipe`) without rounding."""
    count = in_range(recipe.bits, 1, LARGEST_BITS, f"bits of {name}")
    exponent = in_range(recipe.exponent, SMALLEST_EXPONENT, LARGEST_EXPONENT, f"exponent of {name}")
    n = (bits >> np.uint64(64 - count)).astype(np.int64) - 2 ** (count - 1)
    head_axis, shard_axis = head_and_shard_axes(name)
    if head_axis is not None:
        heads = np.arange(bits.shape[head_axis], dtype=np.int64)
        n += along(heads * offset_of(recipe.head, bits, f"head of {name}"), head_axis, bits.ndim)
    shards = in_range(recipe.shards, 1, 2**16, f"shards of {name}")
    if shard_axis is not None:
        length = bits.shape[shard_axis]
        group = np.arange(length, dtype=np.int64) * shards // max(length, 1)
        n += along(group * offset_of(recipe.shard, bits, f"shard of {name}"), shard_axis, bits.ndim)
    with np.errstate(over="ignore"):
        x = np.ldexp(n.astype(np.float64), exponent)
    exact = np.abs(n) <= 2**53
    exact &= np.isfinite(x) & (np.ldexp(x, -exponent) == n)
    require_exact(bool(exact.all()), name, "in float64")
    return x


def along(x: NDArray[np.int64], axis: int, rank: int) -> NDArray[np.int64]:
    return x.reshape(tuple(-1 if n == axis else 1 for n in range(rank)))


def offset_of(x: Any, bits: NDArray, what: str) -> int:
    """Return an offset of a recipe; raise an error if the offset is so large that a sum could exceed int64."""
    largest = LARGEST_OFFSET // max(bits.size, 2**16)
    return in_range(x, -largest, largest, what)


def in_range(x: Any, low: int, high: int, what: str) -> int:
    if type(x) is not int or not low <= x <= high:
        raise OptionError(
            f"{what} as an integer from {low} to {high}", shown(x), "change the recipe"
        )
    return x


def dtype_of(name: str) -> type:
    return np.bool_ if name in BOOLEANS else np.int64 if name in INTEGERS else np.float64


def from_values(name: str, shape: tuple[int, ...], values: Any) -> NDArray:
    """Make an array from nested booleans, integers or numbers, of which the input ``name`` accepts one kind."""
    kinds = (bool,) if name in BOOLEANS else (int,) if name in INTEGERS else (int, float)
    check_kinds(values, kinds, name)
    x: NDArray | None
    try:
        x = np.array(values, dtype=dtype_of(name))  # reads "nan", too
    except (ValueError, OverflowError, TypeError):
        x = None
    if x is None or x.shape != shape:
        raise ShapeError(
            f"values of {name} of shape {shape}",
            "rows of unequal lengths" if x is None else str(x.shape),
            "give one value per element",
        )
    return x


def check_kinds(values: Any, kinds: tuple[type, ...], name: str) -> None:
    if isinstance(values, tuple):
        if set(map(type, values)) <= set(kinds):
            return
        for value in values:
            check_kinds(value, kinds, name)
    elif type(values) not in kinds and not (values == "nan" and name == "parts_o"):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise OptionError(f"values of {name} of type {wanted}", shown(values), "change the recipe")


def apply_patch(x: NDArray, patch: Patch, name: str) -> None:
    """Set or multiply part of a tensor in place."""
    where = tuple(chosen(entry, n, name) for entry, n in zip(patch.at, x.shape, strict=False))
    if len(patch.at) != x.ndim or (patch.set is None) == (patch.multiply is None):
        raise OptionError(
            f"a patch of {name} with {x.ndim} entries in 'at', and either 'set' or 'multiply'",
            shown(patch),
            "write null in 'at' for a whole axis",
        )
    if patch.set is not None:
        x[where] = from_values(name, (), patch.set)
        return
    if not is_power_of_two(patch.multiply) or x.dtype != np.float64:
        raise OptionError(
            f"'multiply' of {name} as a power of two, in a tensor of floats",
            shown(patch.multiply),
            "scale with a power of two, so that the result is exact",
        )
    before = x[where].copy()
    with np.errstate(over="ignore", under="ignore"):
        x[where] *= patch.multiply
        require_exact(bool((x[where] / patch.multiply == before).all()), name, "in float64")


def is_power_of_two(x: Any) -> bool:
    """Return whether ``x`` is a float64 number of the form 2**n or -2**n."""
    try:
        return type(x) in (int, float) and abs(math.frexp(x)[0]) == 0.5
    except OverflowError:  # an int beyond float64
        return False


def chosen(entry: Any, length: int, name: str) -> slice:
    """Convert one entry of a patch's ``at`` to a slice of an axis of this ``length``."""
    if entry is None:
        return slice(None)
    start, stop = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, None)
    start = in_range(start, 0, max(length - 1, 0), f"index in a patch of {name}")
    stop = start + 1 if stop is None else in_range(stop, start + 1, length, f"stop of {name}")
    return slice(start, stop)


def require_exact(exact: bool, name: str, where: str) -> None:
    if not exact:
        raise OptionError(
            f"values of {name} that are exact {where}",
            "a value that would be rounded",
            "use fewer bits, smaller offsets or another exponent",
        )


def format_of_input(case: Case, name: str) -> str | None:
    """Return the number format in which an input is stored; None for integers and booleans."""
    if case.formats is None or name in INTEGERS or name in BOOLEANS:
        return None
    return case.formats.inputs if name in NARROW else case.formats.statistics


def input_of(case: Case, name: str) -> NDArray:
    """Make one input of a case, in its storage dtype."""
    x = draw(name, shape_of(case, name), case.inputs.tensors[name], case.inputs.seed)
    storage = format_of_input(case, name)
    if storage is None:
        return x
    if not (np.isfinite(x) | may_hold(case, name, x)).all():
        raise NonFiniteError(f"finite values in {name}", "infinity or NaN", "change the recipe")
    require_exact(bool(((round_to(x, storage) == x) | np.isnan(x)).all()), name, f"in {storage}")
    return store(x, storage)


def may_hold(case: Case, name: str, x: NDArray) -> NDArray[np.bool_]:
    """Tell which elements are an infinity or NaN that the input may have.

    An empty part of a merge may hold NaN in parts_o, and its parts_lse is -inf, or +inf if the term ``empty_lse`` says so.
    """
    if name == "parts_o":
        return np.isnan(x)
    if name == "parts_lse" and "empty_lse" in case.terms:
        return np.isposinf(x)
    return np.isneginf(x) if name in WITH_MINUS_INFINITY else np.zeros(x.shape, np.bool_)


def inputs_of(case: Case) -> dict[str, NDArray]:
    """Make all inputs of a case as global tensors in their storage dtypes, in the order of :data:`NAMES`.

    In the case's input format: q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv], dy [B, H, Sq, Dv], parts_o
    [N, B, H, S, Dv]. In its statistics format: dlse, lse, delta [B, H, Sq], bias, sinks [H, N], parts_lse and parts_sum
    [N, B, H, S]. int64: segments, positions, bounds. bool: mask, keep. Raises
    :class:`~ringspec.errors.OptionError` if a required input is missing or the operation does not accept an input, and
    the errors of :func:`draw`.
    """
    must, may = expected_names(case)
    given = set(case.inputs.tensors)
    for name in sorted(given - must - may):
        raise OptionError(
            f"inputs of the operation {case.operation!r} ({', '.join(case.passes)})",
            shown(name),
            nearest(name, must | may),
            code="unknown-name",
        )
    for name in sorted(must - given):
        raise OptionError(f"the input {name}", "none", f"give a recipe for {name}")
    return {name: input_of(case, name) for name in NAMES if name in given}
