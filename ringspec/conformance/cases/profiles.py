"""The profiles: which cases run, and in which order."""

from __future__ import annotations

import functools

from ringspec.conformance.cases import (
    edges,
    golden,
    layouts,
    noise,
    pairs,
    probes,
    properties,
    random_seeds,
    readout,
    scheme_bits,
    schemes,
    sharp,
    worker_bits,
)
from ringspec.conformance.cases.model import PROFILES, RunCase
from ringspec.conformance.target.capabilities import INTEGER_OPERATIONS, Capabilities
from ringspec.conformance.target.declared import check_name

__all__ = ["cases_for", "run_cases"]

WITH_MORE = ("smoke", "core", "full")


def run_cases(profile: str = "core") -> list[RunCase]:
    """Return all cases of a profile, 'smoke', 'core', 'full', 'seeds', 'noise' or 'sharp', in their order.

    Readouts come first, because they say most about a fault: their results show the weight of each query and key.
    Probes (cases with very simple inputs), golden vectors, properties, pairs of features and edges follow. Noise cases,
    which test the statistics of rounding errors, come last; 'smoke' has none. 'noise' has only the noise cases, and
    'seeds' only random inputs. 'sharp' has only larger noise cases; a run with ``--sharp`` adds one of them. 'layouts' has
    only cases of the operation 'layout', 'schemes' those of 'context_parallel', and 'worker-bits' those of promised bits;
    :func:`cases_for` adds them. Raises OptionError for another name.
    """
    check_name("the name of a profile", profile, PROFILES)
    if profile == "seeds":
        return list(random_seeds.cases())
    if profile == "sharp":
        return list(sharp.cases())
    if profile in ("layouts", "schemes"):
        return layouts.cases() if profile == "layouts" else schemes.cases()
    if profile == "worker-bits":
        return [*worker_bits.cases(), *scheme_bits.cases()]
    found = [] if profile == "noise" else list(_cases_of_parts(profile))
    return found if profile == "smoke" else [*found, *noise.cases()]


@functools.cache
def _cases_of_parts(profile: str) -> tuple[RunCase, ...]:
    """Make the cases of a profile, without noise cases. A run asks for them twice, and making them takes a second."""
    parts = (readout, probes, golden, properties, pairs, edges)
    return tuple(case for part in parts for case in part.cases(profile))


def cases_for(profile: str, claims: Capabilities) -> list[RunCase]:
    """Return all cases of a profile for a target: :func:`run_cases`, and those of layouts and schemes that it claims.

    The cases of layouts and of schemes are added if the target claims one of them, and to 'core' and 'full' those of bits
    that it promises for every number of workers.

    >>> len(cases_for("smoke", Capabilities())) == len(run_cases("smoke"))
    True
    """
    found = run_cases(profile)
    integers = any(name in INTEGER_OPERATIONS for name in claims.operations)
    if profile in WITH_MORE:
        found += layouts.cases() if integers else []
        found += schemes.cases(profile) if claims.schemes else []
    if profile in ("core", "full") and claims.invariant_under_workers != "nothing":
        found += run_cases("worker-bits")
    return found
