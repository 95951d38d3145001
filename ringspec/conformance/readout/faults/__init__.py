"""What a ring may do wrong: the choices that it makes, and every mistake that is tried, with its words and places.

The files, in the order in which they are read: :mod:`.choices`, :mod:`.places` and :mod:`.kinds` say what a fault is.
(The list in :mod:`.choices` is to be skimmed; later files explain its terms.) Then come the mistakes themselves::

    masks         visible, tile_rules, last_tiles, document_masks, window_masks, masks, tile_places
    inputs        sources, operands
    merges        merge_formulas, merges, part_results, sink_kinds
    gradients     product_kinds
    both passes   block_kinds
    forward       forward_kinds
    backward      backward_kinds

:mod:`.effects` says which results each of them can change, and :mod:`.hints` where in a kernel to look.
"""
