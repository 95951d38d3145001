"""Precision recipes: the points at which an implementation rounds, and the number format at each point (rule NUM-2).

At each point, a value is rounded once, to nearest even, to the format that the recipe names. A recipe also says how
large the tiles are and how partial results are merged, because both affect rounding errors. :mod:`ringspec.spec`
computes with a recipe. The comparison of results and the conformance suite derive the largest accepted errors from it.

>>> recipe("bf16").p
'bfloat16'
>>> recipe("bf16").replace(name="mine", p="float32").p
'float32'
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ringspec.errors import OptionError, nearest, shown
from ringspec.formats import FORMATS, Array, format_of, product, round_to, rounded_input

MERGE_ORDERS = ("state", "normalised")
P_REFERENCES = ("block", "running", "stale", "row", "lse", "block_lse", "any")


@dataclass(frozen=True)
class Recipe:
    """The rounding points of one implementation, in the order of the computation.

    ``name`` is the name of the recipe, and ``note`` describes it. The value of each rounding point below is the name of
    a format (:data:`ringspec.formats.FORMATS`). Raises OptionError for an unknown format, for an invalid tile size, and
    in :meth:`replace` for a keyword that is not a field of a recipe.

    In this list, z is a score after scale and bias, and s is the score after the soft cap as well. The running softmax
    of a row keeps its maximum m, its sum of exponentials l and its output o.

    ``inputs``              q, k, v and the upstream gradient dy, as they are stored
    ``products``            accumulator of every matrix product: float64 or float32. A recipe does not declare
                            the order of summation; it is that of this machine's BLAS.
    ``scores``              s, and t = tanh(z / softcap)
    ``statistics``          exp(s - m), m, l and lse
    ``p``                   P as an operand of P V and of P^T dy
    ``block_o``             o of one block, as the block's computation returns it
    ``merge``               each product and each sum in a merge of two partial results (rule NUM-3)
    ``carried_o``           o as it is kept between ring steps
    ``outputs``             the final o, which the backward pass reads as well
    ``lse``                 the final lse, as the forward pass returns it
    ``backward_lse``        lse as the backward pass reads it to compute exp(s - lse)
    ``dy_o_products``       each product dy * o before the products of a row are summed
    ``delta``               dy_o_sum, which is the sum of the products dy * o of a row, and then dy_o_sum - dlse
    ``ds``                  dZ, the gradient with respect to z, as an operand of dZ K and of dZ^T Q; without a soft cap,
                            dZ equals dS
    ``tile_dq``             the accumulator of dq over the key tiles of one block
    ``tile_dkv``            the accumulators of dk, dv over the query tiles of one block
    ``block_gradients``     dq, dk, dv of one block, as the block's computation returns them
    ``carried_dq``          the accumulator of dq between ring steps
    ``carried_dkv``         the accumulators of dk, dv between ring steps
    ``gradients``           the final dq, dk, dv
    ``merge_order``         'state': a block returns its unnormalised (m, l, o), and these are merged;
                            'normalised': a block returns its normalised (o, lse), and these are merged
    ``tile_q``, ``tile_k``  rows and columns of a tile inside a block; None: one tile is the whole block.
                            With ``tile_k``, the softmax is online inside the block as well.
    ``p_relative_to``       the number c in P = exp(s - c) when the forward pass rounds P. A row, or the part of a row
                            in one block, has the same c, which determines the binade in which P is rounded. One of:
                            'block', the row's maximum in the block (each block starts a fresh state,
                            and the states are merged);
                            'running', the row's maximum so far (one state is carried through the ring);
                            'stale', an earlier maximum, replaced only when the new one is larger by
                            more than 8 log(2) (lazy rescaling);
                            'row', the maximum of the whole row (two passes);
                            'lse', the final lse of the row;
                            'block_lse', the row's lse in the block (each block has its own softmax,
                            and the results are merged);
                            'any', an unknown choice among the above.
                            None: not declared. The conformance suite then accepts each of the above.
                            The specification itself rounds relative to the row's maximum in the block.
    ``merge_recipe``        the name of the merge recipe (:data:`ringspec.merges.MERGES`) that describes the merges of
                            partial results and the sums of gradients, or None. The prediction of rounding errors then
                            follows its formula, order and roundings. The specification itself merges as ``merge_order``
                            says; :func:`ringspec.replay_as` merges with the recipe. :func:`ringspec.merges.with_merges`
                            sets this field together with the rounding points that the merge recipe implies.

    A method such as ``to_p(x)`` rounds a float64 array of any shape at the rounding point in its name: to_products,
    to_scores, to_statistics, to_p, to_block_o, to_merge, to_carried_o, to_outputs, to_lse, to_backward_lse,
    to_dy_o_products, to_delta, to_ds, to_tile_dq, to_tile_dkv, to_block_gradients, to_gradients.

    An input beyond the range of the input format raises NonFiniteError. If products accumulate in float32, an overflow
    in a product gives infinity or NaN, as in a kernel. If products accumulate in float64, an overflow raises
    NonFiniteError.
    """

    name: str
    inputs: str = "float64"
    products: str = "float64"
    scores: str = "float64"
    statistics: str = "float64"
    p: str = "float64"
    block_o: str = "float64"
    merge: str = "float64"
    carried_o: str = "float64"
    outputs: str = "float64"
    lse: str = "float64"
    backward_lse: str = "float64"
    dy_o_products: str = "float64"
    delta: str = "float64"
    ds: str = "float64"
    tile_dq: str = "float64"
    tile_dkv: str = "float64"
    block_gradients: str = "float64"
    carried_dq: str = "float64"
    carried_dkv: str = "float64"
    gradients: str = "float64"
    merge_order: str = "state"
    tile_q: int | None = None
    tile_k: int | None = None
    p_relative_to: str | None = None
    merge_recipe: str | None = None
    note: str = ""

    def __post_init__(self) -> None:
        for point in ROUNDING_POINTS:
            format_of(getattr(self, point))
        if self.products not in ("float64", "float32"):
            raise OptionError(
                "products in 'float64' or 'float32' (what matrix units accumulate in)",
                shown(self.products),
                "declare 'float32', and narrower sums as carried_dkv or merge",
            )
        if not isinstance(self.merge_order, str) or self.merge_order not in MERGE_ORDERS:
            raise OptionError(
                "a merge order",
                shown(self.merge_order),
                nearest(self.merge_order, MERGE_ORDERS),
                code="unknown-name",
            )
        if self.p_relative_to is not None and self.p_relative_to not in P_REFERENCES:
            raise OptionError(
                "the maximum that P is relative to, or None if not declared",
                shown(self.p_relative_to),
                nearest(self.p_relative_to, P_REFERENCES),
                code="unknown-name",
            )
        if self.merge_recipe is not None and not isinstance(self.merge_recipe, str):
            raise OptionError(
                "merge_recipe as the name of a merge recipe, or None",
                shown(self.merge_recipe),
                "use ringspec.merges.with_merges(recipe, 'te_p2p')",
            )
        for size_name in ("tile_q", "tile_k"):
            size = getattr(self, size_name)
            if size is not None and not (type(size) is int and size >= 1):
                raise OptionError(
                    f"{size_name} as a positive int, or None for the whole block",
                    shown(size),
                    f"pass {size_name}=128",
                )

    # One method for each point at which the specification rounds; in the recipe float64, each is the identity.
    # x is a float64 array of any shape.

    def to_inputs(self, x: Array, what: str) -> Array:
        """Round q, k, v or dy to the input format; raise NonFiniteError for a value out of range.

        ``what`` names the tensor in the error.
        """
        return rounded_input(x, self.inputs, what)

    def matmul(self, a: Array, b: Array) -> Array:
        """Return a @ b for a [..., n, k] and b [..., k, m], accumulated in the format ``products``."""
        return product(a, b, self.products)

    def to_products(self, x: Array) -> Array:
        return round_to(x, self.products)

    def to_scores(self, x: Array) -> Array:
        return round_to(x, self.scores)

    def to_statistics(self, x: Array) -> Array:
        return round_to(x, self.statistics)

    def to_p(self, x: Array) -> Array:
        return round_to(x, self.p)

    def to_block_o(self, x: Array) -> Array:
        return round_to(x, self.block_o)

    def to_merge(self, x: Array) -> Array:
        return round_to(x, self.merge)

    def to_carried_o(self, x: Array) -> Array:
        return round_to(x, self.carried_o)

    def to_outputs(self, x: Array) -> Array:
        return round_to(x, self.outputs)

    def to_lse(self, x: Array) -> Array:
        return round_to(x, self.lse)

    def to_backward_lse(self, x: Array) -> Array:
        return round_to(x, self.backward_lse)

    def to_dy_o_products(self, x: Array) -> Array:
        return round_to(x, self.dy_o_products)

    def to_delta(self, x: Array) -> Array:
        return round_to(x, self.delta)

    def to_ds(self, x: Array) -> Array:
        return round_to(x, self.ds)

    def to_tile_dq(self, x: Array) -> Array:
        return round_to(x, self.tile_dq)

    def to_tile_dkv(self, x: Array) -> Array:
        return round_to(x, self.tile_dkv)

    def to_block_gradients(self, x: Array) -> Array:
        return round_to(x, self.block_gradients)

    def to_gradients(self, x: Array) -> Array:
        return round_to(x, self.gradients)

    def replace(self, **changes: Any) -> Recipe:
        """Return a copy with some fields changed; give it a new ``name``."""
        known = {f.name for f in dataclasses.fields(self)}
        for field_name in changes:
            if field_name not in known:
                raise OptionError(
                    "a rounding point of a recipe",
                    repr(field_name),
                    nearest(field_name, known),
                    code="unknown-name",
                )
        return dataclasses.replace(self, **changes)

    def as_dict(self) -> dict[str, str | int | None]:
        """Return the recipe as plain data, for reports and files."""
        return dataclasses.asdict(self)


ROUNDING_POINTS = tuple(f.name for f in dataclasses.fields(Recipe) if f.default == "float64")


def _mixed(name: str, narrow: str, note: str) -> Recipe:
    """Build a recipe with inputs, P, dS and results in the format ``narrow``, and float32 everywhere else.

    If ``narrow`` is a 16-bit format, this is the arithmetic of FlashAttention.

    Source: Dao, FlashAttention-2 (https://arxiv.org/abs/2307.08691), section 3: inputs, P and dS
    enter the matrix units in 16 bits; accumulators and statistics are float32.
    """
    return Recipe(
        name,
        inputs=narrow,
        products="float32",
        scores="float32",
        statistics="float32",
        p=narrow,
        block_o="float32",
        merge="float32",
        carried_o="float32",
        outputs=narrow,
        lse="float32",
        backward_lse="float32",
        dy_o_products="float32",
        delta="float32",
        ds=narrow,
        tile_dq="float32",
        tile_dkv="float32",
        block_gradients="float32",
        carried_dq="float32",
        carried_dkv="float32",
        gradients=narrow,
        note=note,
    )


def _partials(name: str, narrow: str) -> Recipe:
    """Build a recipe that rounds to 16 bits the results of each block and the accumulators after each ring step.

    Public rings that call an existing kernel for each block round in this way. The error grows with the number of
    workers (https://github.com/zhuzilin/ring-flash-attention/issues/42).
    """
    return _mixed(name, narrow, "partials rounded to the input type between ring steps").replace(
        block_o=narrow,
        carried_o=narrow,
        block_gradients=narrow,
        carried_dq=narrow,
        carried_dkv=narrow,
        merge_order="normalised",
    )


def _float8(name: str, narrow: str) -> Recipe:
    """Build a recipe with 8-bit inputs; P, dS and results are bfloat16."""
    return _mixed(name, "bfloat16", "8-bit inputs, bfloat16 operands and results").replace(
        inputs=narrow
    )


def _public_nki(name: str, mixed_precision: bool) -> Recipe:
    """Build the recipe of the public ring attention kernels in AWS's NKI library, according to their source code.

    P and dS are bfloat16. A block returns o unnormalised, in the type of q. The merge rounds o, each product and each
    sum to bfloat16. Statistics and final gradients are float32. Without the kernels' option ``mixed_precision``, the
    input type is used for the accumulators of dk and dv, and for the lse and dy_o_sum that the backward pass reads. The
    dq that a worker sends is always float32. Queries are cut into tiles of 128 rows; the row maximum is taken over the
    whole block. Source: https://github.com/aws-neuron/nki-library (ring attention, context encoding).
    """
    accumulator = "float32" if mixed_precision else "bfloat16"
    note = "public NKI kernels: P and the merge in bfloat16"
    return _mixed(name, "bfloat16", note).replace(
        block_o="bfloat16",
        merge="bfloat16",
        carried_o="bfloat16",
        dy_o_products="bfloat16",
        backward_lse=accumulator,
        delta=accumulator,
        tile_dkv=accumulator,
        carried_dkv=accumulator,
        gradients="float32",
        tile_q=128,
    )


def nki_impl(name: str, narrow: str, mixed_precision: bool = True) -> Recipe:
    """Build the recipe of the ring attention kernels in the package nki_impl (``nki_impl.kernels``).

    P and dS have the input type; dS is computed from P before P is rounded. A block returns o in float32. The merge and
    everything carried between ring steps are float32. The final o is rounded once, and dq, dk, dv are float32. The row
    maximum is taken over the whole block; dk and dv are summed over 128 query rows at a time. Without the kernels'
    option ``mixed_precision``, the input type is also used for lse, dy_o_sum, the products dy * o, and the dk and dv
    carried between ring steps.

    The recipe omits some roundings to float32 in the kernels: o and dq are summed over 128 keys at a time, the final
    division is a reciprocal and a product, and dP - dy_o_sum is rounded before it is multiplied. It also ignores that
    the kernels split more than 2048 keys on a worker into several blocks, each with its own maximum. Without
    ``mixed_precision``, the kernels add to the carried dk and dv once for each query head of a group and each 2048
    rows; the recipe adds once for each block.
    """
    changes: dict[str, Any] = {"gradients": "float32", "tile_q": 128}
    if not mixed_precision:
        low = ("dy_o_products", "backward_lse", "delta", "carried_dkv")
        changes |= dict.fromkeys(low, narrow)
    note = "kernels of nki_impl: P and dS of the input type, all else in float32"
    return _mixed(name, narrow, note).replace(**changes)


RECIPES: dict[str, Recipe] = {
    r.name: r
    for r in (
        Recipe("float64", note="the definition"),
        _mixed("float32", "float32", "float32 throughout"),
        _mixed("bf16", "bfloat16", "bfloat16 operands and results, float32 accumulation"),
        _mixed("fp16", "float16", "float16 operands and results, float32 accumulation"),
        _partials("bf16_partials", "bfloat16"),
        _partials("fp16_partials", "float16"),
        _float8("fp8_e4m3", "float8_e4m3fn"),
        _float8("fp8_e5m2", "float8_e5m2"),
        _public_nki("nki", mixed_precision=True),
        _public_nki("nki_low", mixed_precision=False),
        nki_impl("nki_impl_bf16", "bfloat16"),
        nki_impl("nki_impl_fp16", "float16"),
        nki_impl("nki_impl_fp32", "float32"),
    )
}


# The recipe for each number format, under the names that libraries use for the format.
OF_FORMAT = {
    "bf16": ("bfloat16",),
    "fp16": ("float16", "half", "f16"),
    "float32": ("fp32", "f32", "single", "float"),
    "float64": ("fp64", "f64", "double"),
    "fp8_e4m3": ("float8_e4m3fn", "float8_e4m3", "fp8"),
    "fp8_e5m2": ("float8_e5m2",),
}


def recipe(which: str | Recipe) -> Recipe:
    """Return the recipe called ``which``, or ``which`` itself if it is a recipe.

    Raises :class:`~ringspec.errors.OptionError` for an unknown name. The message suggests the nearest known name; if
    the name is that of a number format, it suggests the recipe for this format.

    >>> recipe("bfloat16")
    Traceback (most recent call last):
    ringspec.errors.OptionError: expected the name of a recipe, or a Recipe; got 'bfloat16'. Fix: write 'bf16'.
    """
    if isinstance(which, Recipe):
        return which
    if not isinstance(which, str) or which not in RECIPES:
        raise OptionError(
            "the name of a recipe, or a Recipe",
            shown(which),
            _nearest_to(which),
            code="unknown-name",
        )
    return RECIPES[which]


def _nearest_to(which: object) -> str:
    """Return a suggestion for an unknown name of a recipe: the nearest known name, or the recipe of a number format.

    >>> _nearest_to("torch.bfloat16"), _nearest_to("FP64"), _nearest_to("bf16-partials")
    ("write 'bf16'", "write 'float64'", "write 'bf16_partials'")
    """
    name = which.lower().rpartition(".")[2] if isinstance(which, str) else which
    of_format = {other: own for own, others in OF_FORMAT.items() for other in others}
    if isinstance(name, str):
        name = of_format.get(name, name)
    return nearest(name, RECIPES)


__all__ = [
    "FORMATS",
    "MERGE_ORDERS",
    "P_REFERENCES",
    "RECIPES",
    "ROUNDING_POINTS",
    "Recipe",
    "recipe",
]
