"""Search for the faults that explain the results of one problem.

The files, in the order in which they are read: :mod:`.matches` (comparing), :mod:`.fault_sets` (the search itself),
:mod:`.read_factors`, :mod:`.vocabulary` (all faults), :mod:`.context` (what the passes share), :mod:`.starts`, then the two
passes::

    forward                                 backward
    row_search, tile_search, part_search    backward_match, backward_trials
    forward_search                          backward_search

:mod:`.read_problem` reads both passes of a problem with them. Before it come :mod:`.sizes`, :mod:`.not_finite`,
:mod:`.rounding`, :mod:`.known_faults` (those of other problems) and :mod:`.unexplained` (what is left, in words).
"""
