"""The figures of the notebooks and the documentation, drawn with matplotlib from plain data.

``attention_pattern``      which worker computes which (query, key) pairs, one panel for each ring step
``schedule_diagram``       which blocks are sent: one row for each worker, one column for each ring step
``work_balance``           number of visible pairs by worker and step, for several layouts
``row_state``              softmax state (m, l, o) of one query row after each step
``cost_timeline``          when each worker computes and sends
``pattern_beside``         the attention pattern found in a kernel's results, next to the expected pattern
``error_against_workers``  errors against the number of workers W, one line for each recipe (where a kernel rounds)
``error_by_row``           the error of every row, and the limits of several tolerance rules
``noise_scores``           errors divided by the predicted rounding noise, and whether they grow with the result

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
