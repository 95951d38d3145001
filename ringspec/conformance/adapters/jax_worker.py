"""The program of a JAX target's process: runs one call at a time, on one device per worker.

The target is the implementation under test: a JAX function. :mod:`ringspec.conformance.adapters.jax_mesh` starts this
program. It takes over standard input and output for the protocol of ``cmd:`` targets (docs/conform/protocol.md); what
the function prints goes to the log. jax is imported by functions, so that this module can be imported without it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ringspec.conformance.adapters.control import take_control
from ringspec.conformance.target.versions import installed

AXIS = "workers"
MOST_TEXT = 1900
MOST_COMPILED = 64
PER_CALL = ("id", "inputs", "result")
Arrays = dict[str, Any]
Message = dict[str, Any]


def prepare(setup: Mapping[str, Any]) -> None:
    """Set the environment variables that JAX reads when it starts."""
    if setup["platform"] == "cpu":
        flags = os.environ.get("XLA_FLAGS", "")
        count = f"--xla_force_host_platform_device_count={setup['devices']}"
        os.environ["XLA_FLAGS"] = f"{flags} {count}".strip()
        os.environ["JAX_PLATFORMS"] = "cpu"


def wide_types(wide: bool) -> Any:
    """Return a context manager that enables or disables 64-bit types, in new and older versions of JAX."""
    import jax

    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(wide)
    from jax.experimental import enable_x64

    return enable_x64(wide)


def mapped(local: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """Map ``local`` over the mesh; every argument and result is split along its first axis, over all axes of the mesh."""
    import jax
    from jax.sharding import PartitionSpec

    split = PartitionSpec(mesh.axis_names)
    if hasattr(jax, "shard_map"):
        whole = jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    else:
        from jax.experimental.shard_map import shard_map

        whole = shard_map(local, mesh=mesh, in_specs=split, out_specs=split, check_rep=False)
    return jax.jit(whole)


def evaluate(function: Callable[..., Any], message: Message, given: Arrays) -> Arrays:
    """Compute the forward pass and, if requested, the vjp. Inputs and results are [W, ...]."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from ringspec.conformance.adapters.torch_worker import LEAVES, SEEDS
    from ringspec.conformance.target.protocol import Refused

    workers, devices = message["workers"], jax.devices()
    if workers > len(devices):
        raise Refused(
            f"{workers} workers, but there are {len(devices)} {devices[0].platform} devices"
        )
    shape = dict(message.get("mesh") or [(AXIS, workers)])
    mesh = Mesh(np.array(devices[:workers]).reshape(tuple(shape.values())), tuple(shape))

    with wide_types(message["formats"]["inputs"] == "float64"):
        placed = jax.device_put(given, NamedSharding(mesh, PartitionSpec(mesh.axis_names)))
        leaves = {name: placed[name] for name in LEAVES if name in placed}
        rest = {n: x for n, x in placed.items() if n not in (*LEAVES, *SEEDS)}
        seeds = [placed.get(name) for name in SEEDS]
        ring = compiled(function, message, mesh, shapes_of(given))
        results = derived(lambda x: ring(x, rest), leaves, seeds, message["passes"])
        return {name: np.asarray(x) for name, x in results.items()}


def shapes_of(given: Arrays) -> str:
    return str([(name, x.shape, str(x.dtype)) for name, x in sorted(given.items())])


COMPILED: dict[str, Callable[..., Any]] = {}


def compiled(
    function: Callable[..., Any], message: Message, mesh: Any, shapes: str
) -> Callable[..., Any]:
    """Return the function mapped over the mesh.

    Calls that differ only in values share one compiled function.
    """
    import jax

    from ringspec.conformance.adapters.torch_worker import Place, local_call

    plain = {name: value for name, value in message.items() if name not in PER_CALL}
    key = json.dumps(plain, sort_keys=True) + shapes
    if key in COMPILED:
        return COMPILED[key]

    def local(leaves: Arrays, rest: Arrays) -> tuple[Any, ...]:
        tensors = {name: x[0] for name, x in (leaves | rest).items()}
        axes = mesh.axis_names if message.get("scheme") else AXIS
        place = Place(jax.lax.axis_index(axes), message["workers"], axes, None)
        call = local_call(message, place, tensors)
        returned = function(*(tensors[n] for n in "qkv"), axis_name=axes, call=call)
        several = returned if isinstance(returned, (tuple, list)) else (returned,)
        return tuple(x[None] for x in several[:2])

    while len(COMPILED) >= MOST_COMPILED:
        COMPILED.pop(next(iter(COMPILED)))
    COMPILED[key] = mapped(local, mesh)
    return COMPILED[key]


def derived(
    ring: Callable[..., Any], leaves: Arrays, seeds: list[Any], passes: list[str]
) -> Arrays:
    """Compute the results of the requested ``passes``: o, lse if the function returns it, and gradients."""
    import jax
    import jax.numpy as jnp

    if "backward" not in passes:
        return dict(zip(("o", "lse"), ring(leaves), strict=False))
    outputs, pull = jax.vjp(ring, leaves)
    if len(outputs) < 2 and seeds[1] is not None:
        raise ValueError("the call has dlse, but the function returned no lse")
    # A wrong dtype of o or lse must not raise here: the suite reports it from the results.
    cotangents = tuple(
        jnp.zeros_like(x) if seed is None else seed.astype(x.dtype)
        for x, seed in zip(outputs, seeds, strict=False)
    )
    gradients = {f"d{name}": x for name, x in pull(cotangents)[0].items()}
    if "forward" in passes:
        return dict(zip(("o", "lse"), outputs, strict=False)) | gradients
    return gradients


def answer(
    function: Callable[..., Any] | str, message: Message, packages: tuple[str, ...] = ()
) -> Message:
    """Return the answer to one call, even if the call fails, and write the results to its file.

    The answer names those of ``packages`` that this process has imported.
    """
    from ringspec.conformance.target.protocol import Refused
    from ringspec.tensorfile import read_tensors, write_tensors

    try:
        if isinstance(function, str):
            return {"kind": "error", "id": message["id"], "message": function}
        results = evaluate(function, message, read_tensors(message["inputs"]))
        write_tensors(message["result"], results)
    except Refused as refused:
        return {"kind": "refused", "id": message["id"], "reason": str(refused)}
    except Exception:
        return {"kind": "error", "id": message["id"], "message": last_of_traceback()}
    have = asdict(installed(packages, imported=True))
    return {"kind": "result", "id": message["id"]} | have


def last_of_traceback() -> str:
    """Return the end of the current traceback, and write all of it to the log."""
    text = traceback.format_exc()
    sys.stderr.write(text)
    return text[-MOST_TEXT:]


def loaded(setup: Mapping[str, Any]) -> Callable[..., Any] | str:
    """Return the function, or the reason why it cannot be loaded."""
    try:
        import jax

        from ringspec.conformance.adapters.torch_worker import load_function

        jax.devices()
        return load_function(setup["function"], setup["options"])
    except Exception:
        return last_of_traceback()


def hello(message: Message, setup: Mapping[str, Any]) -> Message:
    """Answer the first request, 'hello', with the function's name and the packages of this process."""
    have = asdict(installed(setup["packages"]))
    return {"kind": "hello", "protocol": message["protocol"], "name": setup["function"]} | have


def main() -> None:
    """Answer requests until the control stream ends."""
    setup = json.loads(sys.argv[1])
    control = take_control()
    prepare(setup)
    function = loaded(setup)
    while True:
        message = control.next()
        if message["kind"] == "hello":
            control.reply(hello(message, setup))
        else:
            control.reply(answer(function, message, setup["packages"]))


if __name__ == "__main__":
    main()
