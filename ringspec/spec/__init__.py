"""The specification, for reading in this order; in brackets, the prefix of the rules that a file computes.

1. ``essence``         ring attention in one page: forward and backward, without options
2. ``model``           what a call consists of: tensors, rows, columns, terms, tiles (in ``ringspec/problem/``)
3. ``masks``           which query attends to which key [MASK]
4. ``dropout``         the counter-based keep mask [DROP]
5. ``dense_forward``   dense attention: the definition of o and lse [FWD]
6. ``dense_backward``  the gradient of dense attention: the definition of dq, dk, dv, dsinks, dbias [BWD]
7. ``online_softmax``  the running state (m, l, o): start, absorb a tile, merge two states, finish [SOFT]
8. ``block``           a block of queries against a block of keys, forward and backward [BWD-10, BWD-11]
9. ``layout``          which token lies on which worker [LAYOUT]
10. ``cp_offset``      the causal mask of two blocks in local indices [RING-8 to RING-10]
11. ``schedule``       who sends what to whom, as data [RING]
12. ``worker``         what one worker holds, receives and sends
13. ``ring_forward``   the forward pass of one worker
14. ``ring_backward``  the backward pass of one worker, both circulations [RING-7, RING-12, RING-13]
15. ``rules``          the index of rules, with every file of each

``recipe.to_p(x)`` and the like round x where ``ringspec/recipes.py`` says [NUM]; in float64 they change nothing.
"""
