"""Context parallelism: every way to split attention over ranks, in one model. Read the files in this order.

1. ``mesh``            ranks along named axes
2. ``sharding``        which cells (token, head) each rank holds
3. ``scheme``          what every rank computes with in each step, and what moves afterwards, as data
4. ``parts``           the tensors of a shard: take, place, join
5. ``collectives``     the name of a transfer, derived from the shardings before and after it
6. ``execute``         the executor: loops over steps and ranks
7. ``numbers``         its arithmetic of numbers, with the functions of :mod:`ringspec.spec`
8. ``multisets``       its arithmetic of multisets, for the validator
9. ``defects``         the reasons for which a scheme is refused
10. ``atoms``          a few tokens and heads in place of many
11. ``validator``      proves that a scheme computes attention
12. ``rings``          constructors: ring, double ring
13. ``exchanges``      constructors: Ulysses, USP, joint attention
14. ``gathers``        constructors: gathered keys, prefill (PCP), decode (DCP)
15. ``mla``            multi-head latent attention as a problem with one key head
16. ``show``           schemes as text
17. ``run``            run a scheme and put the results together
18. ``cost``           what each rank sends, holds and computes
19. ``build``          names and keywords of a call
20. ``api``            :func:`ringspec.context_parallel`
"""
