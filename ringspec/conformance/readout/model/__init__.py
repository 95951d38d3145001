"""A model of ring attention that works on matrices over pairs of tokens, in which every choice of a kernel is data.

With the correct :class:`~ringspec.conformance.readout.faults.choices.Choices` it computes softmax attention and its
gradient; with others, what a wrong kernel does.

A *pair* [a, b, h, i, j] is query i of worker a with key j of worker b in query head h. The matrix S contains the
scores <q, k> times the scale, G = <dy, v>, P the weights in the backward pass, and dS the gradient of the scores. A *row* is
one query in one head. A *block* [a, b] contains all pairs of two workers. It is computed in one *step*, and its result
is merged into a running softmax with the maximum m and the sum l of each row. p is a pair's weight within its block or
row. A *share* is what one pair adds to a row of o or of a gradient. The index (g, x, y) counts the rows of dy: query y
of worker x in head g.

The files, in the order in which they are read: :mod:`.ring` (the problem, and what has been computed), :mod:`.arrays`
(small operations), :mod:`.scores`, then the two passes::

    forward                                     backward
    part_results, tile_merging, blocks          statistics (lse, delta), shares
    merging, sinks, storing, forward            backward

:mod:`.keeping` stores what similar choices share.
"""
