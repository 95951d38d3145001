"""A roofline estimate of a run on trn2: counted work divided by published peak rates.

The estimate is optimistic. It assumes no latency, no instruction overhead, no dependence between engines, and that
every transfer runs at the peak rate. It shows which engine a kernel uses most, not how long the kernel takes. Rates
published for a chip are divided by 8, its number of cores.

Sources:

- CHIP: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/about-neuron/arch/neuron-hardware/trainium2.html
- CORE: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/guides/architecture/trainium2_arch.html
"""

from __future__ import annotations

from dataclasses import dataclass

from nki_impl.sim.machine.counters import Counters

CHIP = (
    "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/"
    "about-neuron/arch/neuron-hardware/trainium2.html"
)
CORE = (
    "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/"
    "nki/guides/architecture/trainium2_arch.html"
)
CORES_PER_CHIP = 8


@dataclass(frozen=True)
class Rate:
    """A published peak rate of one core: ``per_second`` of ``unit``, with the published figure and its source."""

    unit: str
    per_second: float
    says: str
    source: str


RATES = {
    "tensor": Rate("FLOP", 79e12, "79 dense BF16/FP16/TF32 TFLOPS per core (FP32: 20)", CORE),
    "vector": Rate("element", 256 * 0.96e9, "256 elements per cycle at 0.96 GHz", CORE),
    "scalar": Rate("element", 128 * 1.2e9, "128 elements per cycle at 1.2 GHz", CORE),
    "dma": Rate("byte", 3.5e12 / CORES_PER_CHIP, "3.5 TB/s of DMA per chip", CHIP),
    "collective": Rate("byte", 1.28e12 / CORES_PER_CHIP, "1.28 TB/s of NeuronLink per chip", CHIP),
}
"""The published rates by engine; there is none for gpsimd."""


@dataclass(frozen=True)
class Bound:
    """The least time that one engine of one core needs for its work, at its peak rate."""

    engine: str
    work: int
    unit: str
    seconds: float
    rate: Rate


@dataclass(frozen=True)
class Roofline:
    """The least times of the engines of one core, the longest first.

    ``overlapped``: the longest of these times, if all engines work in parallel. ``in_turn``: the sum of these times, if
    one engine works at a time. ``unrated``: engines that were used but have no published rate.
    """

    bounds: tuple[Bound, ...]
    unrated: tuple[str, ...]

    @property
    def overlapped(self) -> float:
        """Seconds if all engines work in parallel."""
        return max((bound.seconds for bound in self.bounds), default=0.0)

    @property
    def in_turn(self) -> float:
        """Seconds if one engine works at a time."""
        return sum(bound.seconds for bound in self.bounds)


def roofline(counters: Counters, lnc: int = 1) -> Roofline:
    """Return the estimate for one core of a rank; it assumes that the rank's ``lnc`` cores share the work evenly."""
    bounds = []
    for engine, rate in RATES.items():
        row = counters.of_engine(engine)
        work = {"FLOP": row.flops, "element": row.elements, "byte": row.bytes}[rate.unit]
        if row.instructions:
            bounds.append(Bound(engine, work, rate.unit, work / lnc / rate.per_second, rate))
    bounds.sort(key=lambda bound: -bound.seconds)
    rated = set(RATES) | {"sync"}
    return Roofline(tuple(bounds), tuple(e for e in counters.engines if e not in rated))
