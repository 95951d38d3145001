"""Describe a device by what it computes and sends per second and what it holds, with the source of each figure.

Each worker of a ring is one device. ``PRESETS`` holds two devices with their published figures. A file
(:mod:`ringspec.plan.hardware_file`) or keyword arguments can give other figures, such as measured rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ringspec.errors import OptionError, nearest, shown

ASSUMED = "assumed: no figure is published"


@dataclass(frozen=True)
class Rate:
    """A figure with its source.

    ``value``: the number. ``says``: the statement in the source from which the number follows. ``source``: the address
    of the source, or a note that the number was given by the user, measured or assumed.
    """

    value: float
    says: str
    source: str


@dataclass(frozen=True)
class Link:
    """A connection between workers, for rings of at most ``workers`` workers (None: any number).

    ``name``: label shown in output. ``bytes_per_second``: rate from one worker to the next in one direction, while all
    other workers send as well. ``latency``: seconds from the start of a transfer to its first byte, counted once for
    each ring step.
    """

    name: str
    bytes_per_second: Rate
    latency: Rate
    workers: int | None = None


@dataclass(frozen=True)
class Hardware:
    """One device, called ``name``, and its ``links``, the fastest first.

    ``flops_per_second``: peak rate of dense matrix products, for each number format of the operands.
    ``forward_efficiency`` and ``backward_efficiency``: the fraction of this peak that an attention kernel reaches, if
    only visible pairs are counted. ``memory``: bytes. ``memory_bytes_per_second``: bandwidth of the memory.
    """

    name: str
    flops_per_second: Mapping[str, Rate]
    forward_efficiency: Rate
    backward_efficiency: Rate
    memory: Rate
    memory_bytes_per_second: Rate
    links: tuple[Link, ...]

    def peak(self, number_format: str) -> Rate:
        """Return the peak rate of matrix products for operands of ``number_format``; raise OptionError if unknown."""
        if number_format not in self.flops_per_second:
            raise OptionError(
                f"a rate of {self.name} for operands in {number_format}",
                f"rates for {', '.join(self.flops_per_second)}",
                "plan with another recipe, or give flops_per_second",
                code="hardware",
            )
        return self.flops_per_second[number_format]

    def efficiency(self, backward: bool) -> Rate:
        """Return the efficiency of the backward pass if ``backward``, else of the forward pass."""
        return self.backward_efficiency if backward else self.forward_efficiency

    def link(self, workers: int) -> Link:
        """Return the link that limits a ring of ``workers`` workers: the first of ``links`` for that many workers.

        Raises OptionError if there is none.

        >>> PRESETS["h200"].link(8).name, PRESETS["h200"].link(9).name
        ('NVLink', 'InfiniBand')
        """
        for link in self.links:
            if link.workers is None or workers <= link.workers:
                return link
        raise OptionError(
            f"a link of {self.name} for {workers} workers",
            f"links for at most {max(link.workers or 0 for link in self.links)}",
            "plan fewer workers, or give a link without a number of workers",
            code="hardware",
        )

    def with_rates(
        self,
        flops_per_second: Any = None,
        efficiency: Any = None,
        bytes_per_second: Any = None,
        latency: Any = None,
        memory: Any = None,
    ) -> Hardware:
        """Return a copy with some rates replaced; None leaves a rate as it is.

        ``flops_per_second`` applies to all number formats, ``efficiency`` to both passes,
        ``bytes_per_second`` to a ring of any size, ``latency`` to all links; ``memory`` is in bytes.
        Raises OptionError for a value that is not a valid rate.

        >>> PRESETS["h200"].with_rates(bytes_per_second=2e11, latency=0).link(4096).name
        'given'
        """
        changed = self
        if flops_per_second is not None:
            rate = given(flops_per_second, "flops_per_second")
            changed = replace(changed, flops_per_second=dict.fromkeys(FORMATS_RATED, rate))
        if efficiency is not None:
            rate = given(efficiency, "efficiency", most=1.0)
            changed = replace(changed, forward_efficiency=rate, backward_efficiency=rate)
        if memory is not None:
            changed = replace(changed, memory=given(memory, "memory"))
        if bytes_per_second is not None:
            wait = Rate(0.0, "no latency", "given") if latency is None else given_latency(latency)
            link = Link("given", given(bytes_per_second, "bytes_per_second"), wait)
            return replace(changed, links=(link,))
        if latency is not None:
            wait = given_latency(latency)
            changed = replace(changed, links=tuple(replace(x, latency=wait) for x in self.links))
        return changed


FORMATS_RATED = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")


def given(x: Any, what: str, most: float = 1e30) -> Rate:
    """Return a Rate with the source 'given'; x must be finite, above zero and at most ``most``."""
    return Rate(positive(x, what, most), what, "given")


def given_latency(x: Any) -> Rate:
    return Rate(positive(x, "latency", 3600.0, zero=True), "latency", "given")


def positive(x: Any, what: str, most: float = 1e30, zero: bool = False) -> float:
    """Validate a number above 0 and at most ``most``, and return it as float; raise OptionError otherwise.

    With ``zero``, 0 is valid as well.
    """
    ok = isinstance(x, (int, float)) and not isinstance(x, bool)
    try:
        value = float(x) if ok else math.nan
    except OverflowError:
        value = math.inf
    if not ((value > 0 or (zero and value == 0)) and value <= most):
        low = "from 0" if zero else "above 0"
        raise OptionError(
            f"{what} as a number {low} and at most {most:g}",
            shown(x),
            "give it in SI units",
            code="hardware",
        )
    return value


def hardware_named(which: Any) -> Hardware:
    """Return the preset called ``which``; if ``which`` is a Hardware, return it unchanged.

    For an unknown name, raises OptionError, which suggests the nearest name.
    """
    if isinstance(which, Hardware):
        return which
    if not isinstance(which, str) or which not in PRESETS:
        raise OptionError(
            "the name of a preset, or a Hardware",
            shown(which),
            nearest(which, PRESETS),
            code="hardware",
        )
    return PRESETS[which]


TRAINIUM2 = (
    "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/"
    "about-neuron/arch/neuron-hardware/trainium2.html"
)
TRN2 = "https://github.com/aws-neuron/aws-neuron-sdk/blob/master/general/arch/neuron-hardware/trn2-arch.rst"
NEURON_NEAR = (
    "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/"
    "neuron-runtime/explore/intranode-collective-comm.html"
)
NEURON_FAR = (
    "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/"
    "neuron-runtime/explore/internode-collective-comm.html"
)
H200 = "https://www.nvidia.com/en-us/data-center/h200/"
DGX = "https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html"
FLASH3 = "https://arxiv.org/abs/2407.08608"
CUDNN = "cuDNN attention of PyTorch 2.11, causal, bfloat16, 16,384 tokens, D = 128"
MEASURED = "measured on one H200 with tests/benchmarks/plan_rates_cuda.py"
NCCL = "https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc"

NEURON_HOP = "1 to 2 us for each hop of a ring; the larger"
TRN2_RATES = Hardware(
    "trn2",
    MappingProxyType(
        {
            "bfloat16": Rate(667e12, "667 dense BF16/FP16/TF32 TFLOPS of a chip", TRAINIUM2),
            "float16": Rate(667e12, "667 dense BF16/FP16/TF32 TFLOPS of a chip", TRAINIUM2),
            "float32": Rate(181e12, "181 FP32 TFLOPS of a chip", TRAINIUM2),
        }
    ),
    Rate(0.5, "half of the peak", ASSUMED),
    Rate(0.4, "two fifths of the peak", ASSUMED),
    Rate(96 * 2.0**30, "96 GiB of a chip", TRAINIUM2),
    Rate(2.9e12, "2.9 TB/s of a chip", TRAINIUM2),
    (
        Link(
            "NeuronLink-v3, 4 x 4 torus",
            Rate(
                128e9,
                "1,024 GB/s of a chip to four neighbours of the torus, read as both directions together: "
                "a ring along the torus sends over one link one way",
                TRN2,
            ),
            Rate(2e-6, NEURON_HOP, NEURON_NEAR),
            16,
        ),
        Link(
            "NeuronLink-v3 between instances",
            Rate(
                64e9,
                "256 GB/s of a chip to two neighbours of the ring of four instances, read as both "
                "directions together",
                TRN2,
            ),
            Rate(2e-6, NEURON_HOP, NEURON_NEAR),
            64,
        ),
        Link(
            "EFA",
            Rate(25e9, "3,200 Gb/s of an instance, shared by 16 chips", TRN2),
            Rate(15e-6, "about 15 us from point to point", NEURON_FAR),
        ),
    ),
)
H200_RATES = Hardware(
    "h200",
    MappingProxyType(
        {
            "bfloat16": Rate(989.5e12, "1,979 TFLOPS with sparsity, half of it dense", H200),
            "float16": Rate(989.5e12, "1,979 TFLOPS with sparsity, half of it dense", H200),
            "float32": Rate(67e12, "67 FP32 TFLOPS without tensor cores", H200),
        }
    ),
    Rate(0.64, f"636 TFLOPS, {CUDNN}; FlashAttention-3 on an H100: 740 ({FLASH3})", MEASURED),
    Rate(0.52, f"512 TFLOPS, {CUDNN}", MEASURED),
    Rate(141e9, "141 GB", H200),
    Rate(4.8e12, "4.8 TB/s", H200),
    (
        Link(
            "NVLink",
            Rate(
                450e9, "900 GB/s of a GPU, both directions together (303 GB/s measured, NCCL)", H200
            ),
            Rate(11.8e-6, "NCCL's model of a ring, Simple: 8.4 us + 3.4 us over NVLink", NCCL),
            8,
        ),
        Link(
            "InfiniBand",
            Rate(50e9, "one 400 Gb/s adapter for each GPU", DGX),
            Rate(22.4e-6, "NCCL's model of a ring, Simple: 8.4 us + 14.0 us over a network", NCCL),
        ),
    ),
)
PRESETS: Mapping[str, Hardware] = MappingProxyType({"h200": H200_RATES, "trn2": TRN2_RATES})
