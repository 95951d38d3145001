"""``nki.typing`` and ``nki.tensor``: the classes that annotate a kernel's parameters."""

from nki_impl.sim.tensor.views import NkiTensor

tensor = NkiTensor
mutable_tensor = NkiTensor

__all__ = ["NkiTensor", "mutable_tensor", "tensor"]
