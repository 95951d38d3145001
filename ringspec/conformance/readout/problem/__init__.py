"""The problems whose results show, pair of tokens by pair of tokens, what a ring computed.

The files, in the order in which they are read: :mod:`.geometry`, :mod:`.visible`, :mod:`.pairs` (the inputs, and how they
are read from results), :mod:`.settings`, :mod:`.shapes`, :mod:`.problems`, :mod:`.tiles`, :mod:`.chosen`, and
:mod:`.calls` for other calls in the same form.
"""
