"""How many bytes and seconds a case will take, estimated from its shape alone.

The core set has a limit of file bytes and the kernel set one of time; both are known before
anything is generated.
"""

from __future__ import annotations

import math

from ringspec.formats import format_of
from ringspec.vectors.format.case import Case, CaseFormats, Shape
from ringspec.vectors.format.inputs import BOOLEANS, NAMES, format_of_input, shape_of
from ringspec.vectors.format.requires import slots

SAMPLED_ROWS = 16
# A safetensors entry with its name and offsets; case.json apart from digests and nested values.
TABLE_ENTRY, CASE_TEXT, DIGEST_TEXT, VALUE_TEXT = 95, 1100, 95, 14


def bytes_of(format_name: str) -> int:
    return format_of(format_name).dtype.itemsize


def estimated_bytes(case: Case) -> int:
    """File bytes of a case: case.json and tensors.safetensors."""
    outputs, scales = output_sizes(case)
    text = CASE_TEXT + sum(
        VALUE_TEXT * math.prod(shape_of(case, name))
        for name, recipe in case.inputs.tensors.items()
        if recipe.kind == "values"
    )
    if case.storage != "full":
        digests = len(case.inputs.tensors) + 3 * len(outputs) + 4
        text += DIGEST_TEXT * digests
    if case.storage == "digests":
        return text
    total = sum(outputs.values()) + scales + text
    entries = 3 * len(outputs) + 4
    if case.storage == "full":
        total += sum(input_bytes(case, name) for name in case.inputs.tensors)
        entries += len(case.inputs.tensors)
    return total + TABLE_ENTRY * entries


def input_bytes(case: Case, name: str) -> int:
    assert name in NAMES
    storage = format_of_input(case, name)
    item = bytes_of(storage) if storage else 1 if name in BOOLEANS else 8
    return item * math.prod(shape_of(case, name))


def output_sizes(case: Case) -> tuple[dict[str, int], int]:
    """Bytes of each expected tensor in its formats, and of all row scales and layout tables."""
    shape, formats = case.shape, case.formats
    if shape is None or formats is None:
        assert case.ring is not None
        return {"visitor": 8 * case.ring.workers**2 * 2}, 0
    rows_q, rows_k, tables = rows(case, shape)
    sizes, scales = tensor_sizes(case, shape, formats, rows_q, rows_k)
    return sizes, scales + tables


def rows(case: Case, shape: Shape) -> tuple[int, int, int]:
    """Rows of queries and of keys that are stored, and bytes of layout, position and row tables."""
    if case.ring is None:
        return shape.B * shape.H * shape.Sq, shape.B * shape.Hkv * shape.Sk, 0
    n_q, n_k = (case.ring.workers * n for n in slots(case, case.ring, shape))
    if case.storage == "sampled":
        sampled = SAMPLED_ROWS * case.ring.workers
        return sampled, sampled, 8 * (2 * n_q + 2 * n_k + 6 * sampled)
    return shape.B * shape.H * n_q, shape.B * shape.Hkv * n_k, 16 * (n_q + n_k)


def tensor_sizes(
    case: Case, shape: Shape, formats: CaseFormats, rows_q: int, rows_k: int
) -> tuple[dict[str, int], int]:
    both = 8 + bytes_of(formats.outputs) if formats.outputs != "float64" else 8
    statistics = 8 + bytes_of(formats.statistics) if formats.statistics != "float64" else 8
    sizes: dict[str, int] = {}
    scales = 0
    if case.operation != "block" or "forward" in case.passes:
        sizes |= {"o": rows_q * shape.Dv * both, "lse": rows_q * statistics}
        scales += 16 * rows_q
    if "backward" in case.passes:
        sizes["dq"] = rows_q * shape.D * both
        sizes |= {"dk": rows_k * shape.D * both, "dv": rows_k * shape.Dv * both}
        scales += 8 * rows_q + 16 * rows_k
        if "sinks" in case.inputs.tensors:
            workers = 1 if case.ring is None else case.ring.workers + 1
            sizes["dsinks"] = workers * math.prod(shape_of(case, "sinks")) * (statistics + 8)
        if "bias" in case.inputs.tensors:
            bias = shape_of(case, "bias")
            copies = 1 if case.ring is None or bias[2] > 1 else case.ring.workers + 1
            sizes["dbias"] = copies * math.prod(bias) * (both + 8)
    return sizes, scales


def estimated_seconds(case: Case) -> float:
    """Seconds of one core for the exact forward and backward: 2 s at S = 512, D = 128, one head."""
    if case.shape is None:
        return 0.0
    shape = case.shape
    pairs = shape.B * shape.H * shape.Sq * shape.Sk
    width = 0.4 + 0.6 * shape.D / 128
    return 2.0 * pairs / 512**2 * width * (1.0 if "backward" in case.passes else 0.5)
