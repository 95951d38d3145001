"""Prove the faults that explain a readout by the problem's second call, and check them against all other problems.

The files, in the order in which they are read: :mod:`.calls`, :mod:`.ring_results`, :mod:`.replay`, :mod:`.infinite_rows`,
:mod:`.rounded_inputs`, :mod:`.read_proven` (one problem), :mod:`.all_problems`, :mod:`.ways`.
"""
