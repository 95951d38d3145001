"""The calls of flash_attn on which check_flash_attn.py compares the stand-in with the kernel."""

import itertools
from dataclasses import dataclass

import numpy as np
import torch

WINDOWS = (
    (False, (-1, -1)),
    (True, (-1, -1)),
    (False, (50, 0)),
    (False, (0, 50)),
    (False, (17, 30)),
    (False, (-1, 20)),
    (False, (30, -1)),
    (True, (64, -1)),
    (True, (5, 9)),
    (False, (0, 0)),
    (False, (1000, 1000)),
    (False, (3, 1000)),
)
DENSE = (
    ((128,), (128,)),
    ((127,), (127,)),
    ((129,), (200,)),
    ((200,), (129,)),
    ((1,), (300,)),
    ((300,), (1,)),
    ((385,), (385,)),
    ((64,), (600,)),
    ((600,), (64,)),
)
PACKED = (
    ((128, 256), (128, 256)),
    ((5, 131, 64), (5, 131, 64)),
    ((1, 60, 200), (100, 7, 260)),
    ((200, 33), (70, 129)),
    ((40, 0, 77), (50, 20, 77)),
    ((30, 90), (0, 140)),
)
HEADS = ((4, 4), (4, 2), (3, 1))
DIMS = (32, 64, 96, 128, 192, 256, 40, 8)
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """One call. ``kind``: which o and lse the backward pass is given.

    'own': those of the call; 'whole': those of a longer row of keys, as a ring passes them; 'infinite': those of
    the call, with lse +inf in some rows and -inf in others; 'public': the public function with autograd, 'no keys':
    forward only, without keys; 'outside': packed tensors with rows of no sequence; 'views': tensors whose heads come
    before their rows in memory, and with gaps in k.
    """

    number: int
    dtype: torch.dtype
    heads: tuple[int, int]
    dim: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    packed: bool
    causal: bool
    window: tuple[int, int]
    kind: str = "own"
    batch: int = 2

    @property
    def scale(self):
        return 0.9 * self.dim**-0.5

    @property
    def extra(self):
        """Rows of no sequence at the end of packed tensors."""
        return 11 if self.kind == "outside" else 0

    @property
    def name(self):
        words = "causal" if self.causal else "full"
        form = "packed" if self.packed else "dense"
        lengths = "+".join(map(str, self.queries)) + "x" + "+".join(map(str, self.keys))
        heads = f"{self.heads[0]}/{self.heads[1]} heads of {self.dim}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.number} {form} {lengths} {words} {self.window} {heads} {dtype} {self.kind}"

    def sequences(self):
        """The rows of q and of k of each sequence, in tensors [rows, H, D]."""
        if not self.packed:
            (n,), (m,) = self.queries, self.keys
            return [(slice(n * b, n * b + n), slice(m * b, m * b + m)) for b in range(self.batch)]
        return list(zip(slices(self.queries), slices(self.keys), strict=True))

    def cumulative(self):
        """cu_seqlens and max_seqlen of q and k."""
        ends = [
            torch.tensor(np.cumsum([0, *x]), dtype=torch.int32) for x in (self.queries, self.keys)
        ]
        return *ends, max(self.queries), max(self.keys)


def slices(lengths):
    ends = np.cumsum([0, *lengths]).tolist()
    return [slice(*pair) for pair in itertools.pairwise(ends)]


def tensors(case):
    """q, k, v, dy, and further k and v for the kind 'whole', on the CPU."""
    rng = np.random.default_rng(case.number)
    few = (sum(case.keys) + case.extra, case.heads[1])
    many = (sum(case.queries) + case.extra, case.heads[0])
    if not case.packed:
        many, few = (case.batch, *many), (case.batch, *few)
    shapes = (many, few, few, many, few, few)
    made = [torch.zeros((*s, case.dim), dtype=case.dtype) for s in shapes]
    for x in made:
        x.copy_(torch.from_numpy(rng.standard_normal(x.shape)))
    if case.kind == "views":
        made = [x.transpose(-3, -2).contiguous().transpose(-3, -2) for x in made]
        made[1] = torch.cat((made[1], made[1]), -1)[..., : case.dim]
    return made


def cases():
    """Every pair of lengths with every mask; dtypes, heads, head dimensions and kinds change from case to case."""
    kinds = itertools.cycle(("own", "whole", "own", "infinite", "views", "public", "whole"))
    numbers = itertools.count()
    for dtype, packed in itertools.product(DTYPES, (False, True)):
        for lengths, (causal, window) in itertools.product(PACKED if packed else DENSE, WINDOWS):
            at, kind = next(numbers), next(kinds)
            heads, dim = HEADS[at % len(HEADS)], DIMS[at // 2 % len(DIMS)]
            yield Case(at, dtype, heads, dim, *lengths, packed, causal, window, kind)
        if packed:
            for lengths in PACKED[:4]:
                yield Case(
                    next(numbers), dtype, (4, 2), 64, *lengths, True, True, (-1, -1), "outside"
                )
        for causal in (False, True):
            shape = ((7, 3), (0, 0)) if packed else ((70,), (0,))
            yield Case(
                next(numbers), dtype, (4, 2), 64, *shape, packed, causal, (-1, -1), "no keys"
            )
