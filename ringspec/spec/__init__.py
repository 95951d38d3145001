"""The specification, for reading in this order; in brackets, the prefix of the rules that a file computes.

1. ``essence``         ring attention in one page: forward and backward, without options
2. ``masks``           which query attends to which key [MASK]
3. ``dropout``         the counter-based keep mask [DROP]
4. ``dense_forward``   dense attention: the definition of o and lse [FWD]
5. ``dense_backward``  the gradient of dense attention: the definition of dq, dk, dv, dsinks, dbias [BWD]
6. ``online_softmax``  the running state (m, l, o): start, absorb a tile, merge two states, finish [SOFT]
7. ``block``           a block of queries against a block of keys, forward and backward [BWD-10, BWD-11]
8. ``layout``          which token lies on which worker [LAYOUT]
9. ``cp_offset``       the causal mask of two blocks in local indices [RING-8 to RING-10]
10. ``schedule``       who sends what to whom, as data [RING]
11. ``worker``         what one worker holds, receives and sends
12. ``ring_forward``   the forward pass of one worker
13. ``ring_backward``  the backward pass of one worker, both circulations [RING-7, RING-12, RING-13]
14. ``rules``          the index of rules, with every file of each

Read ``ringspec/problem/model.py`` after ``essence``: it defines rows, columns, terms and tiles, which all other files
use. ``recipe.to_p(x)`` and the like round x where ``ringspec/recipes.py`` says [NUM]; in float64 they change nothing.
"""
