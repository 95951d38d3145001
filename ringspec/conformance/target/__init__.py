"""The target protocol: claims, calls and results of a target, the program under test."""

from ringspec.conformance.target.capabilities import Capabilities, capabilities_from, why_not
from ringspec.conformance.target.protocol import (
    Call,
    Crashed,
    Exited,
    Failed,
    Garbage,
    Mutated,
    Refused,
    Result,
    Target,
    TimedOut,
)

__all__ = [
    "Call",
    "Capabilities",
    "Crashed",
    "Exited",
    "Failed",
    "Garbage",
    "Mutated",
    "Refused",
    "Result",
    "Target",
    "TimedOut",
    "capabilities_from",
    "why_not",
]
