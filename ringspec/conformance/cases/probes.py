"""Exact probes: inputs so simple that the correct results are known in advance and a failure shows its cause.

Some probes read the attention pattern from the results (``patterns``). Others change inputs on which a result does not
depend (``invariance``), or have results in closed form (``closed_form``). Some are repeated with 128 tokens per worker
(``long_blocks``).
"""

from __future__ import annotations

from ringspec.conformance.cases.closed_form import known_cases
from ringspec.conformance.cases.invariance import isolation_cases, same_bits_cases
from ringspec.conformance.cases.long_blocks import long_block_cases
from ringspec.conformance.cases.model import RunCase
from ringspec.conformance.cases.patterns import block_cases, gradient_pattern_cases, pattern_cases

SMOKE = (
    "probe/pattern/causal-contiguous-w2-",
    "probe/pattern/full-contiguous-w2-",
    "probe/gradient-pattern/causal-contiguous-w2-",
    "probe/gradient-pattern/causal-zigzag-w2-",
    "probe/pattern/long-causal-contiguous-w2-",
    "probe/pattern/long-causal-zigzag-w2-",
)


def cases(profile: str = "core") -> list[RunCase]:
    """Return the probes of a profile in the order of a run; 'smoke' has only a few of them.

    >>> made = cases()
    >>> made[0].id, len({case.id for case in made}) == len(made)
    ('probe/pattern/full-contiguous-w1-bf16', True)
    """
    made = [
        *pattern_cases(),
        *gradient_pattern_cases(),
        *block_cases(),
        *isolation_cases(),
        *same_bits_cases(),
        *known_cases(),
        *long_block_cases(),
    ]
    return [case for case in made if profile != "smoke" or case.id.startswith(SMOKE)]
