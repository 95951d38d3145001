"""The settings of the readouts: what distinguishes one from another, such as its mask, layout and number of workers.

The lists of settings contain those that are tried, the most informative first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ringspec.conformance.readout.problem.geometry import PER_DOCUMENT

MOST, MOST_WINDOWS = 6, 2
FEATURES = ("softcap", "dlse", "sinks", "bias", "dropout", "padding", "batches")
BATCH = 3
BANDED = "documents-band"  # a window in each document, without a causal mask
# In place of a worker, a group of heads that has all tokens: each worker's tokens are a document of their own.
HEADS, FULL_HEADS = "heads", "heads-full"
# The names under which a target claims a feature, any one of them, if these are not the feature's name alone. A batch
# is not claimed as a feature.
CLAIMED: dict[str, tuple[str, ...]] = {
    "dropout": ("dropout", "keep"),
    "padding": ("padding-slots",),
    "batches": (),
}
CAUSAL, WINDOWS = ("causal", "window", "documents", HEADS, *FEATURES), ("window", "band", BANDED)
PACKED = "documents", BANDED
GROUPS_OF_HEADS = HEADS, FULL_HEADS
WORKERS, MORE_WORKERS, SLOTS, MOST_SLOTS = 3, 4, 8, 16
ODD_SLOTS = 11  # with it, tiles of any size but 11 are cut short at the end of a shard
LAYOUTS = ("contiguous", "zigzag", "striped")
CIRCULATIONS = ("kv", "q", "gather")
NARROW = ("bfloat16", "float16")
FORMATS = ("float32", "float64", *reversed(NARROW))
DTYPES = {"float32": "f32", "float64": "f64", "float16": "fp16", "bfloat16": "bf16"}
BACKWARDS = "backwards"  # in the id of a problem with direction -1


@dataclass(frozen=True)
class Setting:
    """What distinguishes one readout from another: its mask, layout, circulation, direction and sizes.

    ``mask`` is 'causal', 'full', 'window' (a window and a causal mask), 'band' (a window alone), 'documents', or one of BANDED,
    GROUPS_OF_HEADS and FEATURES; those in CAUSAL have a causal mask. ``circulation`` ''
    is the first of 'kv', 'q', 'gather' that the target claims. ``group`` is the number of query heads per key head.
    ``workers`` and ``group`` None are 3 and 2 if the target claims these numbers, and otherwise a number that it
    claims. ``narrow``: the inputs have 16 bits. ``scaled``: the call gives a scale, which is not 1/sqrt(D).
    """

    mask: str
    layout: str
    circulation: str = "kv"
    direction: int = 1
    workers: int | None = None
    group: int | None = None
    narrow: bool = False
    scaled: bool = False
    slots: int | None = None

    @property
    def id(self) -> str:
        """The id of the case with this setting, such as 'readout/causal-contiguous-kv'."""
        parts = [self.mask, self.layout, *([self.circulation] if self.circulation else [])]
        parts += [BACKWARDS] if self.direction < 0 else []
        parts += [] if self.workers is None else [f"w{self.workers}"]
        parts += [] if self.group is None else [f"ratio{self.group}"]
        parts += [] if self.slots is None else [f"n{self.slots}"]
        parts += (["16bit"] if self.narrow else []) + (["scale"] if self.scaled else [])
        return "readout/" + "-".join(parts)


def usual_settings() -> Iterator[Setting]:
    """Yield settings with different masks, layouts and circulations, the most informative first."""
    for circulation in CIRCULATIONS:
        for layout in LAYOUTS:
            yield Setting("causal", layout, circulation)
            if circulation == "kv" or layout == LAYOUTS[0]:
                yield Setting("full", layout, circulation)
    for layout in LAYOUTS:
        yield Setting("window", layout, "")
        yield Setting("band", layout, "")
    for layout in (*LAYOUTS, PER_DOCUMENT):
        yield Setting("documents", layout, "")
    yield Setting(BANDED, PER_DOCUMENT, "")
    for feature in FEATURES:
        yield Setting(feature, "table" if feature == "padding" else LAYOUTS[0], "")


def other_settings() -> Iterator[Setting]:
    """Yield settings for the other direction, rounding, a scale of their own, more workers and other head counts."""
    for circulation in CIRCULATIONS[:2]:
        yield Setting("causal", LAYOUTS[0], circulation, direction=-1)
    yield Setting("causal", LAYOUTS[0], "", scaled=True)
    yield Setting("causal", LAYOUTS[1], narrow=True)
    yield Setting("causal", LAYOUTS[0], workers=MORE_WORKERS)
    for group in (1, 4):
        yield Setting("causal", LAYOUTS[0], group=group)


USUAL = tuple(usual_settings())
# In explain, targets that claim these features are also read in another layout, or only there.
IN_OTHER_LAYOUTS = tuple(
    Setting(feature, layout, "")
    for feature in ("sinks", "bias", "dropout")
    for layout in LAYOUTS[1:]
)
# In explain, targets that claim these are read in them, too; in those with sizes of their own only if all others are
# right, because lists of pairs found in one size say nothing about another.
OF_CALLS = (
    Setting("causal", LAYOUTS[0], "q"),
    Setting("causal", LAYOUTS[0], "gather"),
    Setting("causal", LAYOUTS[0], "", direction=-1),
    Setting("causal", LAYOUTS[1], "", direction=-1),
    Setting("causal", LAYOUTS[2], "", direction=-1),
    Setting("full", LAYOUTS[1], ""),
    Setting("full", LAYOUTS[2], ""),
    Setting("window", LAYOUTS[1], ""),
    Setting("window", LAYOUTS[2], ""),
    Setting("causal", LAYOUTS[0], "", scaled=True),
    Setting("causal", LAYOUTS[0], "", workers=MORE_WORKERS),
    Setting("causal", LAYOUTS[0], "", slots=ODD_SLOTS),
)
# Those that a kernel with large tiles gets, too: their exact truth takes seconds.
IN_TILES = tuple(
    Setting(mask, layout) for mask, layout in (("causal", "contiguous"), ("causal", "zigzag"), ("full", "contiguous"))
)  # fmt: skip
SETTINGS = (*USUAL, *other_settings())
