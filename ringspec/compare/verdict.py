"""Judge a tensor: compare each element on each worker with the true value and the bound of its row.

An element passes if ``|got - want| <= factor * scale + floor``. ``want`` is the true value in float64. ``scale`` is
the row scale, the unit in which a row's errors are measured (:mod:`ringspec.compare.row_scale`). ``factor`` and
``floor`` follow from the declared precision (:mod:`ringspec.compare.bounds`). The correctly rounded value always
passes, and NaN never does.

Special values:

- The lse of an empty row must be -inf. No other element may be -inf.
- A row whose scale is 0 is an empty sum, so it must be 0, of either sign; the floor does not apply.
- If the true value exceeds the largest number of the format, infinity of the same sign is correct, and so is a finite
  number within the bound. Otherwise infinity counts as the number at which the format overflows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringspec.errors import ShapeError
from ringspec.formats import format_of, load, name_of, unit_roundoff

__all__ = ["TensorVerdict", "judge", "judge_tensor"]

Array = NDArray[np.float64]
Booleans = NDArray[np.bool_]
ROW_AXIS = 2
# If several kinds occur in one tensor, the first in this order is reported.
KINDS = (
    "NaN",
    "-inf where finite is due",
    "finite where -inf is due",
    "infinite",
    "not zero",
    "beyond bound",
)
SHAPELESS = ("missing", "wrong shape", "wrong dtype")


@dataclass(frozen=True)
class TensorVerdict:
    """The verdict on one tensor of one worker.

    ``kind``   'ok', or the kind of failure: one of :data:`KINDS` or :data:`SHAPELESS`
    ``error``  the largest error in units of its bound; at most 1 passes. Infinity if no error can be computed
    ``where``  the index (b, h, slot[, d]) of one element, to which ``got`` and ``want`` belong: the worst element, or
               in a failure the worst element with this kind of failure
    ``rows``   number of rows that fail; ``of``: number of rows that were compared (not padding)
    ``limit``  for a tensor that passes: the smallest relative error that would have failed if all elements had it (for
               lse, the smallest absolute error); None if not computed
    """

    tensor: str
    worker: int
    kind: str
    error: float = 0.0
    where: tuple[int, ...] = ()
    got: float | None = None
    want: float | None = None
    rows: int = 0
    of: int = 0
    limit: float | None = None

    @property
    def ok(self) -> bool:
        return self.kind == "ok"


def judge(
    tensor: str,
    got: Sequence[Any] | None,
    want: Sequence[Array],
    rounded: Sequence[Array],
    scale: Sequence[Array],
    factor: float,
    padding: Sequence[Booleans | None] | None = None,
    *,
    floor: float = 0.0,
    format: str | None = None,
) -> tuple[TensorVerdict, ...]:
    """Return one verdict for each worker.

    The parameters are those of :func:`judge_tensor`, but each array becomes a sequence of arrays, one for each worker.
    ``got``: None if the result lacks the tensor. If ``got`` has more workers than ``want``, the verdict on each of
    the additional workers is 'wrong shape'.

    >>> one = np.ones((1, 1, 2))
    >>> verdicts = judge("lse", [one, 2 * one], [one, one], [one, one], [one, one], 1e-6)
    >>> [v.kind for v in verdicts]
    ['ok', 'beyond bound']
    """
    given = [] if got is None else list(got)
    given += [None] * (len(want) - len(given))
    verdicts = [
        judge_tensor(
            tensor,
            given[worker],
            want[worker],
            rounded[worker],
            scale[worker],
            factor,
            None if padding is None else padding[worker],
            floor=floor,
            format=format,
            worker=worker,
        )
        for worker in range(len(want))
    ]
    surplus = range(len(want), len(given))
    return (*verdicts, *(TensorVerdict(tensor, worker, "wrong shape") for worker in surplus))


def judge_tensor(
    tensor: str,
    got: ArrayLike | None,
    want: Array,
    rounded: Array,
    scale: Array,
    factor: float,
    padding: Booleans | None = None,
    *,
    floor: float = 0.0,
    format: str | None = None,
    worker: int = 0,
) -> TensorVerdict:
    """Return the verdict on one worker's tensor.

    ``got``      the result: a float array of any known format, such as [B, H, n, d] or [B, H, n]
    ``want``     the true values in float64, of the same shape
    ``rounded``  ``want`` correctly rounded to the output format (as float64, or in that format's dtype)
    ``scale``    row scale >= 0, in the shape of ``want`` or in this shape without the last axis
    ``factor``   bound in units of the row scale; ``floor``: absolute bound, for underflow
    ``padding``  boolean [n], True for the positions along axis 2 that are not compared
    ``format``   name of the format that the dtype of ``got`` must have; None: any format

    >>> want = np.array([[[[1.0, 2.0]]]])
    >>> scale = np.array([[[4.0]]])
    >>> verdict = judge_tensor("o", np.float32(want + 0.5), want, want, scale, factor=0.25)
    >>> verdict.kind, verdict.error, verdict.where
    ('ok', 0.5, (0, 0, 0, 0))
    >>> judge_tensor("o", want * np.nan, want, want, scale, factor=0.25).kind
    'NaN'
    """
    want, rounded = np.asarray(want, dtype=np.float64), load(rounded, "rounded")
    if got is None:
        return TensorVerdict(tensor, worker, "missing")
    came = np.asarray(got)
    name = name_of(came.dtype)
    if came.shape != want.shape:
        return TensorVerdict(tensor, worker, "wrong shape")
    if name is None or (format is not None and name != format):
        return TensorVerdict(tensor, worker, "wrong dtype")
    compared = ~padding_of(want.shape, padding)
    row = row_axes(want, np.asarray(scale))
    spread = np.broadcast_to(row, want.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        bound = np.where(spread == 0, 0.0, factor * spread + floor)
    values = load(came, tensor)
    errors = errors_in_bounds(values, want, rounded, bound, name)
    fails = compared & ~(errors <= 1.0)
    flat = (-1, want.shape[-1]) if row.shape != want.shape else (-1, 1)
    of = int(compared.reshape(flat).any(axis=1).sum()) if want.size else 0
    if not fails.any():
        return described(tensor, worker, "ok", errors, compared, values, want, 0, of)
    rows = int(fails.reshape(flat).any(axis=1).sum())
    kinds = kinds_of(values, want, spread)
    kind = next(one for one in KINDS if (fails & kinds[one]).any())
    chosen = fails & kinds[kind]
    return described(tensor, worker, kind, errors, chosen, values, want, rows, of)


def padding_of(shape: tuple[int, ...], padding: Booleans | None) -> Booleans:
    """Broadcast ``padding`` [n] to the shape of a tensor; None: no padding."""
    if padding is None:
        return np.zeros(shape, dtype=np.bool_)
    mask = np.asarray(padding)
    if len(shape) <= ROW_AXIS or mask.dtype != np.bool_ or mask.shape != (shape[ROW_AXIS],):
        raise ShapeError(
            "padding as a boolean [n] for the slots of axis 2",
            f"{mask.dtype} of shape {mask.shape} for a tensor of shape {shape}",
            "pass None for a tensor that has no slots",
        )
    return np.broadcast_to(mask.reshape((-1,) + (1,) * (len(shape) - ROW_AXIS - 1)), shape)


def row_axes(want: Array, scale: Array) -> Array:
    """Return the row scale with as many axes as the tensor."""
    if scale.shape == want.shape:
        return scale
    if scale.shape == want.shape[:-1]:
        return scale[..., None]
    raise ShapeError(
        f"a row scale of shape {want.shape} or {want.shape[:-1]}",
        f"shape {scale.shape}",
        "take the scale of the same tensor and worker",
    )


def errors_in_bounds(values: Array, want: Array, rounded: Array, bound: Array, name: str) -> Array:
    """Return |got - want| / bound; 0 where got is the correctly rounded value, NaN where got is NaN."""
    overflow = format_of(name).largest * (1.0 + unit_roundoff(name))  # float64: its largest
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        # Infinity counts as the number at which the format overflows.
        reach = np.where(np.isinf(values), np.copysign(overflow, values), values)
        # want itself may be infinite (an lse of -inf); then only the rounded value passes.
        error = np.where(np.isinf(want) & ~np.isnan(values), np.inf, np.abs(reach - want))
        error = np.where(values == rounded, 0.0, error)
        return np.where(error == 0, 0.0, error / bound)


def kinds_of(values: Array, want: Array, scale: Array) -> dict[str, Booleans]:
    """Return, for each kind of failure, the elements to which it applies."""
    return {
        "NaN": np.isnan(values),
        "-inf where finite is due": np.isneginf(values) & np.isfinite(want),
        "finite where -inf is due": np.isfinite(values) & np.isneginf(want),
        "infinite": np.isinf(values),
        "not zero": (scale == 0) & (want == 0),
        "beyond bound": np.ones(want.shape, dtype=np.bool_),
    }


def described(
    tensor: str,
    worker: int,
    kind: str,
    errors: Array,
    chosen: Booleans,
    values: Array,
    want: Array,
    rows: int,
    of: int,
) -> TensorVerdict:
    """Return a verdict of this kind; it describes the element with the largest error among the ``chosen`` elements."""
    if not chosen.any():
        return TensorVerdict(tensor, worker, kind, rows=rows, of=of)
    ranked = np.where(np.isnan(errors), np.inf, errors)
    worst = int(np.argmax(np.where(chosen, ranked, -1.0)))
    where = tuple(int(i) for i in np.unravel_index(worst, want.shape))
    error, got, due = float(ranked[where]), float(values[where]), float(want[where])
    return TensorVerdict(tensor, worker, kind, error, where, got, due, rows, of)
