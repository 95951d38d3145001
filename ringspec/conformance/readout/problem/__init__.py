"""The problems whose results show, pair of tokens by pair of tokens, what a ring computed.

The files, in the order in which they are read: :mod:`.geometry` (the ring), :mod:`.pairs` (the inputs, and how results
are read), :mod:`.settings` (what is varied), :mod:`.shapes` (the sizes for a target's claims), :mod:`.spread`,
:mod:`.problems`, :mod:`.chosen`.
"""
