"""The figures of the notebooks and the documentation, drawn with matplotlib from plain data.

``attention_pattern``      which worker computes which pairs of a query and a key, by step
``schedule_diagram``       which blocks are sent: one row per worker, one column per ring step
``work_balance``           visible pairs by worker and step, for several layouts
``row_state``              m, l and o of one row against the number of steps done
``cost_timeline``          computing, sending, and their overlap
``pattern_beside``         a recovered attention pattern next to the expected one
``error_against_workers``  errors against W by recipe
``error_by_row``           errors of single rows, and their limits by several rules
``noise_scores``           errors in units of their noise, and the slope test

Each function returns a matplotlib Figure; in a notebook ``matplotlib.pyplot.show()`` shows it. matplotlib is
imported only when a figure is drawn; if it is missing, MissingPackageError says how to install it. Wrong shapes
raise ShapeError.
"""

from ringspec.render.figures_errors import (
    error_against_workers,
    error_by_row,
    noise_scores,
    pattern_beside,
)
from ringspec.render.figures_ring import (
    attention_pattern,
    cost_timeline,
    row_state,
    schedule_diagram,
    work_balance,
)

__all__ = [
    "attention_pattern",
    "cost_timeline",
    "error_against_workers",
    "error_by_row",
    "noise_scores",
    "pattern_beside",
    "row_state",
    "schedule_diagram",
    "work_balance",
]
