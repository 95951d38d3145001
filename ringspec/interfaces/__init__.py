"""Ring attention with the function signatures and tensor layouts of public systems, computed by :mod:`ringspec.spec`.

1. ``ranks``     code that both interfaces use
2. ``nkilib``    ring attention of AWS's NKI library
3. ``ejkernel``  ring flash attention and the flash attention backward of ejkernel

The functions convert their arguments from the public layouts, call the specification, and convert the results back.
Arguments that the public system refuses raise :class:`~ringspec.errors.RefusedError`. In ring functions every tensor
argument and result is a NumPy array whose first axis is the rank. Values are computed in float64 and rounded once to
the dtype of the result. The keyword ``recipe=``, which the public systems do not have, selects where and to which
format intermediate values are rounded.
"""

from ringspec.interfaces import ejkernel, nkilib

__all__ = ["ejkernel", "nkilib"]
