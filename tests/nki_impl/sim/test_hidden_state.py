"""What a kernel must not do in Python with values that exist only on the device, and what it may do."""

from __future__ import annotations

import copy
import inspect
import math
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nki_impl.sim import collectives as ncc
from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim.errors import DynamicValueError, HiddenStateError
from nki_impl.sim.machine.launch import run_ranks

X = np.arange(32, dtype=np.float32).reshape(8, 4)


def loaded(x: Any) -> Any:
    t = nl.ndarray((8, 4), nl.float32)
    nisa.dma_copy(dst=t, src=x)
    return t


def stored(t: Any) -> Any:
    out = nl.ndarray((8, 4), nl.float32, nl.shared_hbm)
    nisa.dma_copy(dst=out, src=t)
    return out


def assigned(t: Any) -> None:
    t.array = X


HIDDEN: dict[str, Callable[[Any], Any]] = {
    "array": lambda t: t.array,
    "storage": lambda t: t.storage.raw,
    "storage by a C function": lambda t: operator.attrgetter("storage")(t),
    "an assignment to array": assigned,
    "the value of a register": lambda t: ncc.rank_id().state,
    "read of a register": lambda t: ncc.rank_id().read("x"),
}

VALUES: dict[str, Callable[[Any], Any]] = {
    "np.exp": lambda t: np.exp(t),
    "np.add with an array": lambda t: X + t,
    "np.asarray": lambda t: np.asarray(t),
    "np.array": lambda t: np.array(t, np.float32),
    "np.concatenate": lambda t: np.concatenate([t, t]),
    "np.float32": lambda t: np.float32(t),
    "np.where": lambda t: np.where(t, 1.0, 0.0),
    "np.float32 of a register": lambda t: np.float32(ncc.rank_id()),
    "math.sqrt": lambda t: math.sqrt(t),
    "float": lambda t: float(t),
    "complex": lambda t: complex(t),
    "divmod": lambda t: divmod(t, 2),
    "len": lambda t: len(t),
    "list": lambda t: list(t),
    "if": lambda t: 1 if t > 0 else 2,
    "max": lambda t: max(t, t),
    "deepcopy": lambda t: copy.deepcopy(t),
    "deepcopy of a list": lambda t: copy.deepcopy([t]),
    "pickle": lambda t: pickle.dumps(t),
}

SAID = {
    "np.exp": "np.exp",
    "np.add with an array": "np.add",
    "np.asarray": "conversion to a NumPy array",
    "np.concatenate": "np.concatenate",
    "float": "float()",
    "divmod": "divmod()",
    "len": "len()",
    "list": "iteration",
    "if": "operator >",
    "deepcopy": "copy.deepcopy()",
    "pickle": "copy or pickle",
}
"""What the message says that the kernel did."""


def refused(kind: type[DynamicValueError], trick: Callable[[Any], Any]) -> str:
    def kernel(x: Any) -> Any:
        t = loaded(x)
        trick(t)
        return stored(t)

    with pytest.raises(kind) as caught:
        run_ranks(kernel, [(X,)])
    return str(caught.value)


@pytest.mark.parametrize("name", HIDDEN)
def test_state_of_the_simulator_is_refused_and_the_line_named(name: str) -> None:
    trick = HIDDEN[name]
    lines, first = inspect.getsourcelines(trick)
    last = first + len(lines) - 1
    message = refused(HiddenStateError, trick)
    assert f"{__file__}:{last})" in message and "Fix:" in message


@pytest.mark.parametrize("name", VALUES)
def test_python_and_numpy_on_values_of_the_device_are_refused_and_the_line_named(name: str) -> None:
    line = inspect.getsourcelines(VALUES[name])[1]
    message = refused(DynamicValueError, VALUES[name])
    assert f"{__file__}:{line})" in message
    if name in SAID:
        assert message.startswith(f"{SAID[name]}: ") and f"got {SAID[name]} on a" in message


def test_hasattr_says_that_the_attribute_does_not_exist() -> None:
    def kernel(x: Any) -> Any:
        assert not hasattr(x, "array") and getattr(x, "storage", None) is None
        assert hasattr(x, "shape")
        return stored(loaded(x))

    assert np.array_equal(run_ranks(kernel, [(X,)]).results[0], X)


def test_all_of_python_is_allowed_for_what_is_known_before_the_run() -> None:
    """NKI 0.7 traces kernels with Python.

    Source: https://awsdocs-neuron.readthedocs-hosted.com/en/v2.33.1/release-notes/components/nki.html
    """

    def kernel(x: Any, *parts: int) -> Any:
        class Doubled(nl.NKIObject):
            def __init__(self, tile: Any) -> None:
                super().__init__()
                self.tile = tile

            def by(self, factor: float) -> None:
                nisa.tensor_scalar(self.tile, self.tile, nl.multiply, factor)

        def columns() -> Any:
            yield from (slice(i, i + 1) for i in range(x.shape[1]))

        t = loaded(x)
        same = copy.copy(t)
        for column in columns():
            Doubled(same[:, column]).by(2.0)
        try:
            tiles = {"t": t, **{f"part {i}": t[i : i + 1] for i in parts}}
        finally:
            total = sum(part.shape[0] for part in tiles.values())
        assert (lambda rows: rows == 10)(total)
        return stored(tiles["t"])

    out = run_ranks(kernel, [(X, 0, 1)]).results[0]
    assert np.array_equal(out, 2 * X)
