"""What a ring may do wrong: the choices that it makes, and every mistake that is tried, with its words and places.

The files, in the order in which they are read: :mod:`.choices`, :mod:`.kinds` and :mod:`.places` say what a fault is.
Then come the mistakes themselves::

    masks         document_masks, window_masks, masks, tile_rules, last_tiles
    inputs        sources, operands
    merges        merge_formulas, merges, part_results, sink_kinds
    both passes   block_kinds
    one pass      forward_kinds, product_kinds, backward_kinds

:mod:`.effects` says which results each of them can change, and :mod:`.hints` where in a kernel to look.
"""
