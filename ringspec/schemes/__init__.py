"""Context parallelism: every way to split attention over ranks, in one model. Read the files in this order.

1. ``mesh``            ranks along named axes
2. ``sharding``        which cells (token, head) each rank holds
3. ``scheme``          what every rank computes with in each step, and what moves afterwards, as data
4. ``parts``           the tensors of a shard: take, place, join
5. ``collectives``     the name of a transfer, derived from the shardings before and after it
6. ``defects``         the reasons for which a scheme is refused
7. ``execute``         the executor: loops over steps and ranks
8. ``numbers``         its arithmetic of numbers, with the functions of :mod:`ringspec.spec`
9. ``multisets``       its arithmetic of multisets, for the validator
10. ``atoms``          a few tokens and heads in place of many
11. ``checks``         what can be checked without a run: form, homes, replicas, collectives
12. ``validator``      proves that a scheme computes attention
13. ``rings``          constructors: ring, double ring
14. ``exchanges``      constructors: Ulysses, USP, joint attention
15. ``gathers``        constructors: gathered keys, prefill (PCP), decode (DCP)
16. ``mla``            multi-head latent attention as a problem with one key head
17. ``show``           schemes as text
18. ``cost``            what each rank sends, holds and computes
19. ``show_run``        runs and their steps as text
20. ``run``             run a scheme and put the results together
21. ``build``           names and keywords of a call
22. ``api``             :func:`ringspec.context_parallel`
"""
