"""Ring attention with the signatures and layouts of public systems, on top of :mod:`ringspec.spec`.

1. ``ranks``     shared: ranks and rings, storage dtypes, a backward pass from given o and lse
2. ``nkilib``    ring attention of AWS's NKI library
3. ``ejkernel``  ring flash attention and the flash attention backward of ejkernel

The functions convert the arguments from the public layouts, call the specification, and convert the results back. They
refuse what the modelled system refuses, with :class:`~ringspec.errors.RefusedError`. Ring functions
take NumPy arrays with one leading axis of ranks on every tensor argument and result. Values are
computed in float64 and rounded once to the dtype of the result. The keyword ``recipe=``, which
the modelled systems do not have, selects a precision recipe instead.
"""

from ringspec.interfaces import ejkernel, nkilib

__all__ = ["ejkernel", "nkilib"]
