"""Known bugs of ring attention, written into the ring of ``torch_ring.py``.

``BUGS`` has them by name; ``WHAT`` says in a sentence what is wrong. Each was seen in public code or
is a trap of the same kind, and each shows on the problem that it names.
"""

from __future__ import annotations

from independent import bugs_backward, bugs_masks, bugs_merge, bugs_schedule  # noqa: F401
from independent.catalogue import BUGS

WHAT = {name: one.what for name, one in BUGS.items()}
