"""Delay a fork of the process until no thread of ``ringspec.fast`` computes.

A forked child has only the thread that forked, and a copy of every lock in its current state. BLAS takes locks in
products. A child that inherits a held lock would wait forever in its first product.
"""

from __future__ import annotations

import os
import threading

# A user's task may wait for the thread that forks, so the fork continues after this many seconds in any case.
PATIENCE = 10.0


class Gate:
    """Record which threads compute, and make them wait between two tasks while another thread forks.

    Computing and forking threads are recorded in sets. Calling :meth:`leave` twice, or without :meth:`enter`, therefore
    has no effect.
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
        """Wait until a fork in progress has ended. Each thread calls this between two tasks."""
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
