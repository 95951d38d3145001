"""The target: what an implementation under test claims, is called with, and returns."""

from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Call, Failed, Refused, Result, Target

__all__ = ["Call", "Capabilities", "Failed", "Refused", "Result", "Target"]
