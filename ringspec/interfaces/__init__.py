"""Public systems' own signatures and layouts, on top of :mod:`ringspec.spec`.

1. ``ranks``     what the interfaces share: ranks and rings, storage dtypes, a backward from o and
                 lse as they were given
2. ``nkilib``    ring attention of AWS's NKI library
3. ``ejkernel``  ring flash attention and the flash attention backward of ejkernel

A function here turns public layouts into calls of the specification and turns the results back. It
refuses what the modelled system refuses, with :class:`~ringspec.errors.RefusedError`. Ring functions
take NumPy arrays with one leading axis of ranks on every tensor argument and result. Values are
computed in float64 and rounded once to the dtype of the result, unless ``recipe=``, a keyword that
the modelled systems do not have, names another arithmetic.
"""

from ringspec.interfaces import ejkernel, nkilib

__all__ = ["ejkernel", "nkilib"]
