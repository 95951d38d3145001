"""torch tensors of NumPy arrays and back, with their strides, and torch's elementary functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import ml_dtypes
import numpy as np

from ringspec.merges import Functions


def tensor(x: np.ndarray):
    """Return a tensor that has the values and strides of ``x``, in memory of its own."""
    import torch

    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.copy(order="K").view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x.copy(order="K"))


def array(x) -> np.ndarray:
    """Return the values of a tensor as a NumPy array of its dtype."""
    import torch

    if x.dtype == torch.bfloat16:
        return x.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def torch_functions() -> Functions:
    """Return torch's elementary functions; they receive the strides of the arrays."""
    import torch

    def of(function):
        return lambda x: function(torch.from_numpy(x)).numpy()

    names = ("exp", "log", "log1p", "exp2", "log2", "sigmoid")
    functions = {name: of(getattr(torch, name)) for name in names}
    return Functions(name="torch", **functions, logsigmoid=of(torch.nn.functional.logsigmoid))


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread of torch: its sigmoid differs in the tails of the threads' shares."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
