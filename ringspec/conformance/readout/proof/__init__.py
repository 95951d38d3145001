"""Prove the faults that explain a problem by other calls, and combine what all problems of a target show.

The files, in the order in which they are read: :mod:`.ring_results`, :mod:`.replay`, :mod:`.infinite_rows`,
:mod:`.rounded_inputs`, :mod:`.proof`, :mod:`.combined`, :mod:`.ways`.
"""
