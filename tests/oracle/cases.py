"""Named attention problems with random data: every feature alone, and many together.

The tensors of a case have distinct scales and a non-zero mean, dy and dlse are random, and every
head is scaled differently, so that a wrong factor, a swapped tensor or head shows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np


@dataclass(frozen=True)
class Case:
    """One problem. `logits` is the standard deviation that scale * <q, k> should have."""

    name: str
    B: int = 1
    H: int = 2
    Hkv: int = 2
    Sq: int = 5
    Sk: int = 5
    D: int = 3
    Dv: int = 3
    logits: float = 1.5
    options: dict = field(default_factory=dict)
    random_options: Callable[["Case", np.random.Generator], dict] | None = None
    dlse: bool = True
    dy: bool = True

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules of ringspec/spec/rules.py that this case was made for."""
        return RULES.get(self.name, ())


# Rules by the case that shows them best: BWD rules on its gradients, the others on its forward.
RULES = {
    "plain": ("FWD-4", "BWD-1", "BWD-3", "BWD-5"),
    "causal": ("MASK-1",),
    "causal, first rows empty": ("MASK-8", "FWD-8", "BWD-10"),
    "window of one integer": ("MASK-2",),
    "window left only": ("MASK-2",),
    "window right unbounded": ("MASK-2",),
    "explicit positions": ("MASK-8",),
    "segments": ("MASK-3",),
    "segments per batch, own keys": ("MASK-3",),
    "packed documents": ("MASK-5",),
    "key bounds": ("MASK-4",),
    "dense mask [Sq, Sk]": ("MASK-6",),
    "bias with masked pairs": ("MASK-7",),
    "bias of every pair": ("FWD-1",),
    "bias per head and key": ("BWD-8",),
    "scale given": ("BWD-5", "BWD-6"),
    "softcap with bias": ("FWD-3", "MASK-7", "BWD-4"),
    "grouped heads": ("FWD-10", "BWD-6", "BWD-7"),
    "three sinks per head": ("FWD-5", "BWD-9"),
    "rows with sinks only": ("FWD-9",),
    "dropout": ("FWD-6", "FWD-7", "BWD-1", "BWD-2", "BWD-7", "DROP-1"),
    "given keep mask": ("DROP-3", "BWD-2"),
    "every term at once": ("MASK-9",),
}


@dataclass(frozen=True)
class Data:
    """Inputs of a case; `options` are the keyword arguments of `rs.attention`."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dy: np.ndarray
    dlse: np.ndarray | None
    options: dict


def draw(case: Case) -> Data:
    """Return the data of a case; the seed is a checksum of its name."""
    generator = np.random.default_rng(crc32(case.name.encode()))
    B, H, Hkv, Sq, Sk, D, Dv = case.B, case.H, case.Hkv, case.Sq, case.Sk, case.D, case.Dv
    per_head = np.linspace(0.7, 1.3, H)[None, :, None, None]
    per_key_head = np.linspace(1.2, 0.8, Hkv)[None, :, None, None]
    q = 1.9 * case.logits * per_head * generator.standard_normal((B, H, Sq, D))
    k = 0.5 * per_key_head * generator.standard_normal((B, Hkv, Sk, D)) + 0.05
    v = 3.0 * per_key_head * generator.standard_normal((B, Hkv, Sk, Dv)) - 0.4
    dy = 0.6 * per_head * generator.standard_normal((B, H, Sq, Dv)) + 0.1
    dlse = 1.7 * generator.standard_normal((B, H, Sq)) - 0.2
    options = dict(case.options)
    if case.random_options is not None:
        options.update(case.random_options(case, generator))
    return Data(
        q=q,
        k=k,
        v=v,
        dy=dy if case.dy else np.zeros_like(dy),
        dlse=dlse if case.dlse else None,
        options=options,
    )


# Options that need random numbers ---------------------------------------------------------------


def bias_of(shape: Callable[[Case], tuple[int, ...]], masked: float = 0.0):
    """Return a maker of a bias of that shape, with -inf in a fraction `masked` of it."""

    def make(case: Case, generator: np.random.Generator) -> dict:
        bias = 1.1 * generator.standard_normal(shape(case)) + 0.3
        bias[generator.random(bias.shape) < masked] = -np.inf
        return {"bias": bias}

    return make


def sinks_of(number: int | None, size: float = 1.0, shift: float = 0.5):
    """Return a maker of sinks [H] (number None) or [H, number]."""

    def make(case: Case, generator: np.random.Generator) -> dict:
        shape = (case.H,) if number is None else (case.H, number)
        return {"sinks": size * generator.standard_normal(shape) + shift}

    return make


def mask_of(shape: Callable[[Case], tuple[int, ...]]):
    """Return a maker of a dense boolean mask of that shape."""

    def make(case: Case, generator: np.random.Generator) -> dict:
        return {"mask": generator.random(shape(case)) < 0.7}

    return make


def keep_of(shape: Callable[[Case], tuple[int, ...]]):
    """Return a maker of a given keep mask of that shape."""

    def make(case: Case, generator: np.random.Generator) -> dict:
        return {"keep": generator.random(shape(case)) < 0.7}

    return make


def positions_of(batched: bool):
    """Return a maker of explicit positions: a shuffled range with gaps for queries and keys."""

    def make(case: Case, generator: np.random.Generator) -> dict:
        rows = case.B if batched else 1
        positions_q = np.stack([generator.permutation(2 * case.Sq)[: case.Sq] for _ in range(rows)])
        positions_k = np.stack([generator.permutation(2 * case.Sk)[: case.Sk] for _ in range(rows)])
        if not batched:
            positions_q, positions_k = positions_q[0], positions_k[0]
        return {"positions_q": positions_q, "positions_k": positions_k}

    return make


def segments_of(batched: bool, own_k: bool):
    """Return a maker of segment numbers -1, 0, 1 (-1 is padding)."""

    def make(case: Case, generator: np.random.Generator) -> dict:
        shape_q = (case.B, case.Sq) if batched else (case.Sq,)
        shape_k = (case.B, case.Sk) if batched else (case.Sk,)
        shares = (0.2, 0.4, 0.4)
        options = {"segments_q": generator.choice((-1, 0, 1), shape_q, p=shares)}
        if own_k:
            options["segments_k"] = generator.choice((-1, 0, 1), shape_k, p=shares)
        return options

    return make


def bounds_of(batched: bool):
    """Return a maker of half open key bounds, some of them empty."""

    def make(case: Case, generator: np.random.Generator) -> dict:
        shape = (case.B, case.Sq) if batched else (case.Sq,)
        bound_min = generator.integers(0, case.Sk, shape)
        length = generator.integers(0, case.Sk, shape)
        return {"bound_min": bound_min, "bound_max": np.minimum(bound_min + length, case.Sk)}

    return make


def together(*makers):
    """Return a maker that joins the options of several."""

    def make(case: Case, generator: np.random.Generator) -> dict:
        options: dict = {}
        for maker in makers:
            options.update(maker(case, generator))
        return options

    return make


def full(case: Case) -> tuple[int, ...]:
    return (case.B, case.H, case.Sq, case.Sk)


def per_key(case: Case) -> tuple[int, ...]:
    return (case.Sk,)


def per_head_and_key(case: Case) -> tuple[int, ...]:
    return (case.H, 1, case.Sk)


def per_query(case: Case) -> tuple[int, ...]:
    return (case.B, 1, case.Sq, 1)


def plane(case: Case) -> tuple[int, ...]:
    return (case.Sq, case.Sk)


def per_batch(case: Case) -> tuple[int, ...]:
    return (case.B, 1, case.Sq, case.Sk)


SEED_64 = 0xDEADBEEF_00000005

CASES = (
    # shapes and masks by position
    Case("plain"),
    Case("two batches, three heads", B=2, H=3, Hkv=3, Sq=4, Sk=4),
    Case("one query, one key", Sq=1, Sk=1),
    Case("one key for many queries", Sk=1),
    Case("head size 1", D=1, Dv=1),
    Case("v wider than q and k", D=2, Dv=4),
    Case("v narrower than q and k", D=4, Dv=1),
    Case("causal", options={"causal": True}),
    Case("causal, more queries than keys", Sq=6, Sk=3, options={"causal": True}),
    Case("causal, more keys than queries", Sq=3, Sk=6, options={"causal": True}),
    Case("causal, end aligned", Sq=3, Sk=6, options={"causal": True, "q_offset": 3}),
    Case("causal, first rows empty", options={"causal": True, "q_offset": -2}),
    Case("window of one integer", options={"window": 1}),
    Case("window left only", options={"window": (2, 0)}),
    Case("window right unbounded", options={"window": (1, None)}),
    Case("window left unbounded", options={"window": (None, 1)}),
    Case("window self only", options={"window": (0, 0)}),
    Case("window beyond the keys, last rows empty", Sq=6, Sk=3, options={"window": (1, 0)}),
    Case("causal window", Sq=6, Sk=6, options={"causal": True, "window": (2, 1)}),
    Case("explicit positions", options={"causal": True}, random_options=positions_of(False)),
    Case(
        "positions per batch with a window",
        B=2,
        Sq=4,
        options={"window": (3, 2)},
        random_options=positions_of(True),
    ),
    # masks by data
    Case("segments", Sq=6, Sk=6, random_options=segments_of(False, False)),
    Case("segments per batch, own keys", B=2, Sq=4, Sk=6, random_options=segments_of(True, True)),
    Case("packed documents", Sq=6, Sk=6, options={"cu_seqlens": (0, 3, 3, 5)}),
    Case(
        "packed documents of unequal lengths, causal",
        Sq=6,
        Sk=5,
        options={"cu_seqlens": (0, 2, 5), "cu_seqlens_k": (0, 3, 4), "causal": True},
    ),
    Case("key bounds", random_options=bounds_of(False)),
    Case("key bounds per batch", B=2, Sq=4, Sk=6, random_options=bounds_of(True)),
    Case("dense mask [Sq, Sk]", random_options=mask_of(plane)),
    Case("dense mask [B, 1, Sq, Sk]", B=2, Sq=4, random_options=mask_of(per_batch)),
    Case("nothing visible", options={"mask": np.zeros((5, 5), dtype=bool)}),
    # scores
    Case("scale given", options={"scale": 0.3}),
    Case("uniform weights", logits=0.0),
    Case("bias of every pair", random_options=bias_of(full)),
    Case("bias per key", B=2, Sq=4, random_options=bias_of(per_key)),
    Case("bias per head and key", B=2, Sq=4, random_options=bias_of(per_head_and_key)),
    Case("bias per query", B=2, Sq=4, random_options=bias_of(per_query)),
    Case("bias with masked pairs", random_options=bias_of(full, masked=0.4)),
    Case("bias with masked keys", B=2, Sq=4, random_options=bias_of(per_key, masked=0.4)),
    Case("softcap", options={"softcap": 2.5}),
    Case("softcap saturated", logits=8.0, options={"softcap": 0.75}),
    Case("softcap with bias", options={"softcap": 2.0}, random_options=bias_of(full, masked=0.3)),
    Case("peaked rows", logits=16.0, D=4),
    Case("very peaked rows", logits=64.0, D=4),
    Case("grouped heads", H=4, Hkv=2, Sq=4, Sk=4),
    Case("one key head", B=2, H=3, Hkv=1, Sq=3, Sk=4, options={"causal": True, "q_offset": 1}),
    # sinks
    Case("one sink per head", random_options=sinks_of(None)),
    Case("three sinks per head", random_options=sinks_of(3)),
    Case(
        "rows with sinks only",
        options={"causal": True, "q_offset": -2},
        random_options=sinks_of(2),
    ),
    Case("a sink above all scores", random_options=sinks_of(None, size=0.1, shift=6.0)),
    Case("a sink far above all scores", random_options=sinks_of(None, size=0.1, shift=30.0)),
    Case("a sink far below all scores", random_options=sinks_of(None, size=0.1, shift=-30.0)),
    Case("grouped heads with sinks", H=4, Sq=4, Sk=4, random_options=sinks_of(None)),
    # dropout
    Case("dropout", options={"dropout_p": 0.4, "dropout_seed": 7}),
    Case("dropout, batches and heads", B=2, H=3, Hkv=3, Sq=3, Sk=4, options={"dropout_p": 0.3}),
    Case(
        "dropout with a seed of 64 bits",
        options={"dropout_p": 0.25, "dropout_seed": SEED_64, "causal": True},
    ),
    Case("dropout probability 0.9", options={"dropout_p": 0.9, "dropout_seed": 11}),
    Case(
        "dropout by position",
        options={"dropout_p": 0.5, "dropout_seed": 3},
        random_options=positions_of(False),
    ),
    Case("given keep mask", options={"dropout_p": 0.3}, random_options=keep_of(full)),
    Case(
        "keep mask of the plane",
        B=2,
        Sq=4,
        options={"dropout_p": 0.6},
        random_options=keep_of(plane),
    ),
    Case("given keep mask, dropout_p left at 0", random_options=keep_of(full)),
    Case("all dropped", options={"dropout_p": 0.5, "keep": np.zeros((5, 5), dtype=bool)}),
    # upstream gradients
    Case("without dlse", dlse=False),
    Case("dlse alone", dy=False, options={"causal": True}),
    # together
    Case(
        "grouped causal window with softcap, bias and sinks",
        H=4,
        Hkv=2,
        Sq=4,
        Sk=6,
        Dv=2,
        options={"causal": True, "window": (3, None), "q_offset": 2, "softcap": 3.0},
        random_options=together(bias_of(per_head_and_key), sinks_of(2)),
    ),
    Case(
        "packed documents, bounds and dropout",
        Sq=6,
        Sk=6,
        options={"cu_seqlens": (0, 2, 6), "dropout_p": 0.3, "dropout_seed": 5},
        random_options=bounds_of(False),
    ),
    Case(
        "segments, mask, bias and given keep",
        B=2,
        Hkv=1,
        Dv=2,
        options={"dropout_p": 0.2, "scale": 0.8},
        random_options=together(
            segments_of(True, False), mask_of(plane), bias_of(full, masked=0.1), keep_of(full)
        ),
    ),
    Case(
        "every term at once",
        B=2,
        H=4,
        Hkv=2,
        Sk=7,
        D=2,
        options={
            "causal": True,
            "window": (6, 3),
            "cu_seqlens": (0, 3, 5),
            "cu_seqlens_k": (0, 5, 7),
            "softcap": 4.0,
            "scale": 0.9,
            "dropout_p": 0.25,
            "dropout_seed": 2**40 + 1,
            "bound_min": np.array([0, 1, 0, 0, 3]),
            "bound_max": np.array([4, 5, 10, 9, 9]),
            "mask": np.array([[j != 1 or i != 0 for j in range(7)] for i in range(5)]),
            "positions_q": np.array([4, 7, 10, 6, 9]),
            "positions_k": np.array([0, 3, 5, 9, 2, 8, 1]),
        },
        random_options=together(bias_of(per_head_and_key), sinks_of(None)),
    ),
)
