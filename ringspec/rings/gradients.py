"""What the results of a ring and of any other scheme have in common: gradients by name, and checks of numbers."""

from __future__ import annotations

from ringspec.errors import NotRecordedError, shown
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


def check_number(what: str, number: object, count: int) -> None:
    """Raise NotRecordedError unless ``number`` is an int from 0 to ``count`` - 1.

    >>> check_number("worker", 3, 3)
    Traceback (most recent call last):
    ringspec.errors.NotRecordedError: expected a worker from 0 to 2; got 3. Fix: count workers from 0.
    """
    if not (is_integer(number) and 0 <= number < count):  # type: ignore[operator]
        wanted = f"a {what} from 0 to {count - 1}" if count > 1 else f"the only {what}, 0"
        raise NotRecordedError(wanted, shown(number), f"count {what}s from 0")
