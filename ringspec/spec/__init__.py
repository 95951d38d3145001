"""The specification, as files to be read in this order. Brackets name the rules of a file: an id, or all ids of a prefix.

1. ``essence``         ring attention in one page: forward and backward, without options
2. ``model``           the parts of a problem: tensors, rows, columns, terms, tiles (in ``ringspec/problem/``)
3. ``recipes``         where values are rounded (``ringspec/recipes.py``) [NUM]; on a first reading, ignore the rounding
4. ``masks``           which query attends to which key [MASK]
5. ``dropout``         the counter-based keep mask [DROP]
6. ``dense_forward``   dense attention: the definition of o and lse [FWD]
7. ``dense_backward``  the gradient of dense attention: the definition of dq, dk, dv, dsinks, dbias [BWD]
8. ``online_softmax``  the running state (m, l, o): start, absorb a tile, merge two states, finish [SOFT]
9. ``block``           queries of one worker against keys of one worker, forward and backward [BWD-10, BWD-11]
10. ``layout``         which worker holds which token, and how kernels store lse in tiles [LAYOUT]
11. ``schedule``       who sends what to whom, as data [RING]
12. ``worker``         what one worker holds, receives and sends
13. ``ring_forward``   the forward pass of one worker
14. ``ring_backward``  the backward pass of one worker, if keys travel and if queries travel [RING-7, RING-12, RING-13]
15. ``rules``          the table of rules, with the files that compute each rule
16. ``cp_offset``      optional: the causal mask of two blocks in local indices [RING-8 to RING-10]

A recipe has a number format for each place where values are rounded. ``recipe.p`` is the name of the format for p, for
example, and ``recipe.to_p(x)`` rounds x to it. ``recipe.matmul(a, b)`` is a @ b, and ``row_sum(x, format)`` is the sum
over the last axis. All files use the following words in the same sense:

``block``            the queries of one worker, or the keys of one worker with their values
``side``             a block as a worker holds it, with the data and gradients that belong to the block
``visitor``          the owner of the travelling block that a worker computes with in a step
``tile``             a rectangle of the score matrix
``rows, columns``    the data of each query and of each key: positions, segments, and for queries rows of bias and masks
``terms``            the parameters that every worker knows, such as the scale
"""
