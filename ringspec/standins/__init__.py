"""Stand-ins for GPU kernels: modules that a ring imports in place of a kernel package, computed in float64 on a CPU.

1. ``names``       which stand-ins and versions exist, and how their names are written
2. ``install``     put stand-ins into ``sys.modules``, and restore it
3. ``attention``   one attention block and its gradients in float64
4. ``rounding``    float64 to the dtype of a result, rounded once
5. ``flash_attn``  the functions of FlashAttention 2.6 to 2.8
6. ``flash_attn_3``  the functions of FlashAttention 3, module ``flash_attn_interface``
7. ``transformer_engine_torch``  the functions of TransformerEngine 2.20 for packed tensors, and its imports
8. ``aten_flash``  ATen's flash-attention operators

A ring that calls a CUDA kernel for each block then runs unmodified on a CPU, so that its schedule, merge, masks and
gradients can be checked. torch is imported by functions only.

>>> with installed("flash_attn"):
...     from flash_attn.flash_attn_interface import _flash_attn_forward
>>> _flash_attn_forward.__name__
'_flash_attn_forward'
"""

from ringspec.standins.install import installed
from ringspec.standins.names import Standin, standin

__all__ = ["Standin", "installed", "standin"]
