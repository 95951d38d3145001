"""The picture of the README: who computes which pairs, in each step of a zigzag ring of four workers.

python docs/picture.py        # writes docs/images/ring.png; needs the extra [notebooks]
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

import ringspec as rs
from ringspec.render import figures

STORED = Path(__file__).parent / "images" / "ring.png"
W, S, D = 4, 16, 4


def draw() -> Any:
    """The figure, from a real run."""
    q, k, v = np.sin(np.arange(3.0 * S * D)).reshape(3, 1, 1, S, D)
    run = rs.ring(q, k, v, workers=W, layout="zigzag", causal=True)
    meetings = [run.schedule.pairs(t) for t in range(len(run.schedule.steps))]
    return figures.attention_pattern(
        np.tri(S, dtype=bool), run.layout_q.table, run.layout_k.table, meetings
    )


def main(path: Path) -> None:
    draw().savefig(path, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else STORED)
