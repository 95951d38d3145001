"""The whole ring in one process: run it, verify its schedule, count its cost, print it.

1. ``attention``, ``merging``, ``layouts``, ``documents``, ``schedules``  public functions: check the arguments, then
   compute
2. ``ring``, ``lockstep``, ``gradients``, ``run``  the whole ring, its loop over steps and workers, and its result
3. ``validator``       proves that a schedule is valid, or says what is wrong with it
4. ``replay_as``       the ring of W workers with the merge of a public implementation
5. ``invariants``      checks of a recorded run, token by token
6. ``cost``, ``show``  the cost of a ring, and the printed text of schedules, states and runs
"""
