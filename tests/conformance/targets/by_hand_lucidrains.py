"""ring-attention-pytorch checked by hand: a program without ringspec, run by test_lucidrains.py.

    python by_hand_lucidrains.py LAYOUT WORKERS [full] [noise]

Processes under gloo run the package's ``ring_flash_attn`` unmodified, with float32 inputs and one bucket per worker;
with a causal mask, or none if ``full`` is given. noise: the tokens and head dimension of the suite's cases 'noise/'.
Prints JSON: for o, dq, dk and dv the largest error against dense float64 attention of the whole sequence, divided by
the largest correct number.
"""

import sys
from functools import partial

import by_hand_ranks

CAUSAL = "full" not in sys.argv[3:]  # spawned processes have the same words
if "noise" in sys.argv[3:]:
    by_hand_ranks.N, by_hand_ranks.D, by_hand_ranks.SCALE = 384 // int(sys.argv[2]), 64, 1 / 8


def attention(q, k, v, rank, workers, layout):
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    return ring_flash_attn(
        q,
        k,
        v,
        causal=CAUSAL,
        bucket_size=q.shape[1],
        ring_reduce_col=True,
        striped_ring_attn=layout == "striped",
        ring_size=workers,
    )


if __name__ == "__main__":
    layout, workers = sys.argv[1], int(sys.argv[2])
    by_hand_ranks.main(partial(attention, layout=layout), workers, layout, causal=CAUSAL)
