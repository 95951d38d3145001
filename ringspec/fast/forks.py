"""Let a fork wait until no thread of the fast path computes.

The child of a fork has only the forking thread, and a copy of every lock in its current state. BLAS takes
locks in products, so a child that copies a locked one would wait forever in its first product.
"""

from __future__ import annotations

import os
import threading

# A user's task may wait for the thread that forks, so the fork continues after this many seconds in any case.
PATIENCE = 10.0


class Gate:
    """Track the threads that compute; let them wait between two tasks while another thread forks.

    Both sets contain thread ids, so leaving twice, or without having entered, has no effect.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset the gate, in the child of a fork: the parent's other threads do not exist here."""
        self.change = threading.Condition()
        self.computing: set[int] = set()
        self.forking: set[int] = set()

    def enter(self) -> None:
        me = threading.get_ident()
        with self.change:
            self.change.wait_for(lambda: not self.forking - {me})
            self.computing.add(me)

    def leave(self) -> None:
        with self.change:
            self.computing.discard(threading.get_ident())
            self.change.notify_all()

    def let_forks_pass(self) -> None:
        """Wait for a fork in progress; called between two tasks."""
        if self.forking:
            self.leave()
            self.enter()

    def before_fork(self) -> None:
        me = threading.get_ident()
        with self.change:
            self.forking.add(me)
            self.change.wait_for(lambda: not self.computing - {me}, PATIENCE)

    def after_fork(self) -> None:
        with self.change:
            self.forking.discard(threading.get_ident())
            self.change.notify_all()


GATE = Gate()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=GATE.before_fork,
        after_in_parent=GATE.after_fork,
        after_in_child=GATE.forget,
    )
