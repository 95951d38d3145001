"""The specification, as files to be read in this order. Brackets give the prefix of the rules that a file computes.

1. ``essence``         ring attention in one page: forward and backward, without options
2. ``model``           what a call consists of: tensors, rows, columns, terms, tiles (in ``ringspec/problem/``)
3. ``recipes``         where values are rounded (``ringspec/recipes.py``) [NUM]; first read each rounding as the identity
4. ``masks``           which query attends to which key [MASK]
5. ``dropout``         the counter-based keep mask [DROP]
6. ``dense_forward``   dense attention: the definition of o and lse [FWD]
7. ``dense_backward``  the gradient of dense attention: the definition of dq, dk, dv, dsinks, dbias [BWD]
8. ``online_softmax``  the running state (m, l, o): start, absorb a tile, merge two states, finish [SOFT]
9. ``block``           a block of queries against a block of keys, forward and backward [BWD-10, BWD-11]
10. ``layout``         which token lies on which worker [LAYOUT]; at its end, how kernels store lse in tiles [LAYOUT-7]
11. ``schedule``       who sends what to whom, as data [RING]
12. ``worker``         what one worker holds, receives and sends
13. ``ring_forward``   the forward pass of one worker
14. ``ring_backward``  the backward pass of one worker, for both circulations [RING-7, RING-12, RING-13]
15. ``rules``          the index of rules, with the files that compute each
16. ``cp_offset``      optional: the causal mask of two blocks in local indices [RING-8 to RING-10]

``recipe.p`` is the name of a number format, and ``recipe.to_p(x)`` rounds x to it. ``recipe.matmul(a, b)`` is a @ b,
and ``row_sum(x, format)`` is the sum over the last axis. These words have one meaning in all files:

``block``            the queries of one worker, or its keys with their values
``side``             a block with all that belongs to it, at the worker where it is now
``visitor``          the owner of the travelling block that a worker computes with in a step
``tile``             a rectangle of the score matrix
``rows, columns``    what belongs to each query, and to each key: positions, segments, rows of bias and of masks
``terms``            the parameters that every worker knows, such as the scale
"""
