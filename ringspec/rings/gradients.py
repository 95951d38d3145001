"""What the results of a ring and of any other scheme have in common: gradients by name, and checks of arguments."""

from __future__ import annotations

from collections.abc import Sequence

from ringspec.errors import NotRecordedError, OptionError, shown
from ringspec.problem.checks import is_integer
from ringspec.problem.model import Array
from ringspec.spec.dense_backward import Gradients


class HasGradients:
    """The gradients of a run as properties; a run without dy has ``gradients`` None."""

    gradients: Gradients | None

    @property
    def dq(self) -> Array | None:
        """Gradient of q [B, H, Sq, D] in global order, float64; None without dy."""
        return None if self.gradients is None else self.gradients.dq

    @property
    def dk(self) -> Array | None:
        """Gradient of k [B, Hkv, Sk, D] in global order, float64; None without dy."""
        return None if self.gradients is None else self.gradients.dk

    @property
    def dv(self) -> Array | None:
        """Gradient of v [B, Hkv, Sk, Dv] in global order, float64; None without dy."""
        return None if self.gradients is None else self.gradients.dv

    @property
    def dsinks(self) -> Array | None:
        """Gradient of the sinks, in the shape in which they were given, float64; None without dy or sinks."""
        return None if self.gradients is None else self.gradients.dsinks

    @property
    def dbias(self) -> Array | None:
        """Gradient of the bias, in the shape in which it was given, float64; None without dy or bias."""
        return None if self.gradients is None else self.gradients.dbias

    def check_phase(self, phase: object) -> None:
        """Raise NotRecordedError unless ``phase`` names a pass that was run."""
        run = ("forward",) if self.gradients is None else ("forward", "backward")
        if not isinstance(phase, str) or phase not in run:
            fix = "use one" if run[1:] else "pass dy for a backward pass"
            raise NotRecordedError(f"phase {' or '.join(map(repr, run))}", shown(phase), fix)


def check_recorded(moments: Sequence[object]) -> None:
    """Raise NotRecordedError if the steps of a run were not recorded."""
    if not moments:
        raise NotRecordedError("a recorded run", "none", "run it again with record=True")


def check_when(when: object, known: Sequence[str]) -> None:
    """Raise OptionError unless ``when`` names a moment of a step."""
    if not isinstance(when, str) or when not in known:
        raise OptionError(f"when as one of {', '.join(known)}", shown(when), "pass when='after'")


def check_number(what: str, number: object, count: int) -> None:
    """Raise NotRecordedError unless ``number`` is an int from 0 to ``count`` - 1.

    >>> check_number("worker", 3, 3)
    Traceback (most recent call last):
    ringspec.errors.NotRecordedError: expected a worker from 0 to 2; got 3. Fix: count workers from 0.
    """
    if not (is_integer(number) and 0 <= number < count):  # type: ignore[operator]
        wanted = f"a {what} from 0 to {count - 1}" if count > 1 else f"the only {what}, 0"
        raise NotRecordedError(wanted, shown(number), f"count {what}s from 0")
