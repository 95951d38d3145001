"""The whole ring in one process, and what is said about it.

1. ``attention``, ``layouts``, ``schedules``  public functions: arguments checked, then the specification
2. ``ring``, ``lockstep``, ``run``  the whole ring, its loop over workers, and its result
3. ``validator``       verifies a schedule, or says what is wrong with it
4. ``cost``, ``show``  what a ring costs, and how it prints
"""
