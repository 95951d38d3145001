"""Search for the faults that explain the results of one problem.

The files, in the order in which they are read: :mod:`.matches` (comparing), :mod:`.vocabulary` (all faults),
:mod:`.reader`, :mod:`.fault_sets` (the search itself) and :mod:`.starts`, then the two passes side by side::

    forward                                 backward
    row_search, tile_search, part_search    backward_match, backward_trials
    forward_search                          backward_search

:mod:`.read_problem` reads both passes of a problem with them.
"""
