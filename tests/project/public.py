"""What is public: the one list that the tests of the documentation go by.

A public name keeps its meaning, stands in the documentation, and has a docstring that can be used without
reading the code. ``WHOLE`` are modules of which everything in ``__all__`` is public, ``CHOSEN`` modules of
which these names are. ``SHOWN`` are the files of the specification: the documentation shows all that they
define, and what is not chosen is a step on the way, to be read where it stands.
"""

import importlib
import inspect
import types
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHOWN = tuple(
    f"ringspec.{room}.{path.stem}"
    for room in ("spec", "problem", "rings")
    for path in sorted((ROOT / "ringspec" / room).glob("[a-z]*.py"))
)
WHOLE = (
    "nki_impl.kernels",
    "nki_impl.lang",
    "nki_impl.packing",
    "nki_impl.sim.coverage",
    "nki_impl.sim.install",
    "nki_impl.sim.machine.launch",
    "nki_impl.target",
    "ringspec",
    "ringspec.comm",
    "ringspec.compare.bounds",
    "ringspec.compare.explain",
    "ringspec.compare.inference.infer",
    "ringspec.compare.noise.predict",
    "ringspec.compare.noise.problem",
    "ringspec.compare.row_scale",
    "ringspec.compare.statistics.tests",
    "ringspec.compare.statistics.types",
    "ringspec.compare.verdict",
    "ringspec.conformance.adapters.command",
    "ringspec.conformance.adapters.jax_mesh",
    "ringspec.conformance.adapters.numpy_lists",
    "ringspec.conformance.adapters.offline",
    "ringspec.conformance.adapters.torch_launched",
    "ringspec.conformance.adapters.torch_processes",
    "ringspec.conformance.adapters.torch_worker",
    "ringspec.conformance.cases.model",
    "ringspec.conformance.cases.profiles",
    "ringspec.conformance.cases.write",
    "ringspec.conformance.report.records",
    "ringspec.conformance.report.report",
    "ringspec.conformance.run.load",
    "ringspec.conformance.target.capabilities",
    "ringspec.conformance.target.declared",
    "ringspec.conformance.target.protocol",
    "ringspec.conformance.target.versions",
    "ringspec.errors",
    "ringspec.exact",
    "ringspec.fast",
    "ringspec.formats",
    "ringspec.interfaces.ejkernel",
    "ringspec.interfaces.nkilib",
    "ringspec.layouts",
    "ringspec.merges",
    "ringspec.plan",
    "ringspec.recipes",
    "ringspec.render",
    "ringspec.render.figures",
    "ringspec.rings.invariants",
    "ringspec.standins",
    "ringspec.tensorfile",
    "ringspec.testing",
    "ringspec.vectors",
    "ringspec.vectors.catalogue.flags",
    "ringspec.vectors.format.case",
    "ringspec.vectors.format.digest",
    "ringspec.vectors.format.inputs",
    "ringspec.vectors.format.requires",
    "ringspec.vectors.make",
    "ringspec.vectors.sets.cache",
    "ringspec.vectors.verify",
)
CHOSEN = {
    "ringspec.spec.block": ("BlockGradients", "block_backward", "block_forward"),
    "ringspec.spec.cp_offset": ("cp_offset", "zigzag_offsets"),
    "ringspec.spec.dense_backward": ("Gradients", "dense_backward", "dy_o_sum"),
    "ringspec.spec.dense_forward": ("Forward", "dense_forward", "scores"),
    "ringspec.rings.cost": ("Cost", "Span", "cost", "timeline"),
    "ringspec.spec.dropout": ("keep_factor", "keep_mask", "philox4x32_10"),
    "ringspec.spec.layout": (
        "Layout",
        "contiguous",
        "lse_from_tiles",
        "lse_to_tiles",
        "shard",
        "striped",
        "unpermute",
        "unshard",
        "zigzag",
        "zigzag_per_document",
    ),
    "ringspec.rings.replay_as": ("Changes", "Replay"),
    "ringspec.rings.layouts": (
        "from_table",
        "lse_from_tiles",
        "lse_to_tiles",
        "make_layout",
        "shard",
        "unpermute",
        "unshard",
    ),
    "ringspec.rings.schedules": (
        "backward_schedule",
        "cp_offset",
        "forward_schedule",
        "zigzag_offsets",
    ),
    "ringspec.spec.masks": ("bounds", "causal", "padding", "segments", "visible", "window"),
    "ringspec.spec.online_softmax": (
        "SoftmaxState",
        "absorb",
        "finish",
        "merge",
        "merge_normalised",
        "normalised",
        "start",
    ),
    "ringspec.problem.options": ("Options", "check", "default_scale"),
    "ringspec.problem.model": ("Columns", "Problem", "Rows", "Terms", "Tile"),
    "ringspec.spec.ring_backward": ("backward_finish", "backward_start", "backward_step"),
    "ringspec.spec.ring_forward": ("forward_finish", "forward_start", "forward_step"),
    "ringspec.spec.rules": ("Rule", "rule"),
    "ringspec.rings.lockstep": ("Moment",),
    "ringspec.rings.run": ("Run", "WorkerResult"),
    "ringspec.spec.schedule": (
        "Schedule",
        "Step",
        "Transfer",
        "backward_schedule",
        "forward_schedule",
        "gather_schedule",
        "ring_permute",
        "ring_schedule",
        "visitor",
    ),
    "ringspec.rings.validator": ("Defect", "find_defects", "validate"),
    "ringspec.spec.worker": ("BackwardState", "ForwardState", "KeySide", "Message", "QuerySide"),
    "ringspec.conformance.run.expected": ("Several", "read_expected"),
    "ringspec.conformance.run.suite": ("Summary", "run"),
    "ringspec.vectors.generate": ("Derived", "derive", "generate"),
}


def defined_in(module: types.ModuleType) -> tuple[str, ...]:
    """Functions and classes that a module defines, without those with a leading underscore."""
    return tuple(
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
    )


def public_names() -> Iterator[tuple[str, str]]:
    """(module, name) of everything public; one object may have several names."""
    for path in WHOLE:
        for name in importlib.import_module(path).__all__:
            yield path, name
    for path, names in CHOSEN.items():
        for name in names:
            yield path, name


def value_of(path: str, name: str) -> object:
    return getattr(importlib.import_module(path), name)


def described() -> dict[str, object]:
    """Public functions and classes, each once, by the name under which it is defined."""
    found = {}
    for path, name in public_names():
        value = value_of(path, name)
        value = getattr(value, "__wrapped__", value)  # what nki.jit made a kernel of
        if inspect.isfunction(value) or inspect.isclass(value):
            found[f"{value.__module__}.{value.__qualname__}"] = value
    return found


def shown() -> dict[str, object]:
    """What the files of the specification define beside what is public, by name."""
    found = {}
    for path in SHOWN:
        for name in defined_in(importlib.import_module(path)):
            value = value_of(path, name)
            found[f"{path}.{name}"] = value
    return {name: value for name, value in found.items() if name not in described()}
