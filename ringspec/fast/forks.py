"""A fork waits until no thread of the fast path computes.

A child of a fork has the forking thread alone, and copies of all locks as they are. BLAS takes locks in
products: a child that copied one of these locked would wait for ever in its first product.
"""

from __future__ import annotations

import os
import threading

# A task of a user may wait for the thread that forks: the fork goes on after so many seconds.
PATIENCE = 10.0


class Gate:
    """Counts the threads that compute; these wait, between two tasks, while another thread forks.

    Both sets hold threads' numbers, so that to leave twice, or without having entered, changes nothing.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In the child of a fork: what other threads did is over."""
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
        """Called between two tasks."""
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
