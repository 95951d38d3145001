"""Convert float64 tensors to the dtype of a result, rounded once, to nearest even."""

from __future__ import annotations

from typing import Any

__all__ = ["rounded"]


def rounded(x: Any, dtype: Any) -> Any:
    """Return the float64 tensor ``x`` in ``dtype``, rounded once.

    torch converts float64 to a 16-bit dtype through float32, which rounds twice. Here the step to float32 rounds to
    odd: towards zero, with the last bit set if anything was cut off. The second rounding then has the result of one
    rounding (Boldo and Melquiond, 2008, https://doi.org/10.1109/TC.2007.70819).

    >>> import pytest; torch = pytest.importorskip("torch")
    >>> x = torch.tensor(1 + 2**-8 + 2**-40, dtype=torch.float64)  # just above the middle of two bfloat16 numbers
    >>> float(x.to(torch.bfloat16)), float(rounded(x, torch.bfloat16))
    (1.0, 1.0078125)
    """
    import torch

    if dtype not in (torch.bfloat16, torch.float16):
        return x.to(dtype)
    near = x.to(torch.float32)
    bits = near.view(torch.int32)
    # Of a float32, the next integer down is the next number towards zero, whatever the sign.
    bits = bits - (near.double().abs() > x.abs()).to(torch.int32)
    inexact = (near.double() != x) & ~torch.isnan(x)
    bits = bits | inexact.to(torch.int32)
    return bits.view(torch.float32).to(dtype)
