"""The ring kernels where the official packages run them, held to the any-order level of bit-tolerance.

    RINGSPEC_NKI=nki-simulate python tests/benchmarks/nki_official.py
    RINGSPEC_NKI=device torchrun --nproc_per_node 4 tests/benchmarks/nki_official.py

The first runs them on the official ``nki.simulate``, which has no collectives: a ring of one rank. The
second, on a Trainium instance with torch-neuronx, makes a ring of its processes; each compares what its
own rank gave. Ends with status 1 if a tensor is outside. Without RINGSPEC_NKI the bundled simulator runs
a ring of one rank. Neither of the two commands has been run: there was neither package nor machine.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
DTYPES = ("bfloat16", "float16", "float32")


def call(kernel: Any, arguments: dict[str, Any], on_device: bool) -> list[Any]:
    """What one rank gives, as NumPy arrays."""
    from nki_impl.lang import nki

    if not on_device:
        return [np.asarray(x) for x in nki.simulate(kernel)(**arguments)]
    import torch
    import torch_xla.core.xla_model as xm

    def there(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        if x.dtype.name == "bfloat16":  # torch takes no array of ml_dtypes
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(xm.xla_device())
        return torch.from_numpy(x).to(xm.xla_device())

    results = kernel(**{name: there(x) for name, x in arguments.items()})
    return [x.cpu().to(torch.float32).numpy() for x in results]  # float32 holds all three types


def run(case: Any, rank: int, on_device: bool) -> dict[str, Any]:
    """Both passes of one rank, by rows; the backward from the forward's o and lse."""
    from nki_impl.kernels import ring_attention_spmd_bwd, ring_attention_spmd_fwd
    from tests.nki_impl.reference import draw
    from tests.nki_impl.running import rows, turned

    given = draw(case)
    q, k, v, dy = (x[rank] for x in (given.q, given.k, given.v, given.dy))
    same = {
        "num_workers": case.workers,
        "softmax_scale": case.scale,
        "use_causal_mask": case.causal,
        "replica_groups": (tuple(range(case.workers)),),
    }
    arguments = {"q": turned(q), "k": turned(k), "v": v, "training": True, **same}
    o, lse = call(ring_attention_spmd_fwd, arguments, on_device)
    by_columns = {"q": q, "k": k, "v": v, "o": o.astype(q.dtype), "dy": dy}
    arguments = {f"{name}_ref": turned(x) for name, x in by_columns.items()}
    arguments |= {"lse_ref": lse, **same}
    gradients = call(ring_attention_spmd_bwd, arguments, on_device)
    named = dict(zip(("dq", "dk", "dv"), map(turned, gradients), strict=True))
    return {"o": o, "lse": rows(lse), **named}


def outside(case: Any, rank: int, mine: dict[str, Any]) -> list[str]:
    """What this rank breaks. For the o and lse of the other ranks those of the recipe stand."""
    from ringspec.rings.layouts import shard
    from tests.nki_impl.prediction import forward, predicted, recipe_for, results, rings_of
    from tests.nki_impl.reference import draw
    from tests.nki_impl.tolerance import broken, broken_any_order, compared

    recipe = recipe_for(case.dtype)
    (ring,) = rings_of(case, draw(case))

    def by_rank(named: Any) -> Any:
        held = {name: np.stack(shard(x, ring.layout)) for name, x in named.items()}
        for name in held:
            held[name][rank] = mine[name]
        return held

    ahead = by_rank(results(ring.layout, forward(ring, recipe)))
    want = predicted(ring, recipe, ahead["o"], ahead["lse"])
    found = compared(ring, recipe, by_rank(want), want, with_noise=False)
    found = [one for one in found if one.rank == rank]
    for one in found:
        told = f"{one.equal:.4f} bit-equal, {one.beyond:.3f} of what any order allows"
        print(f"{case.dtype} causal={case.causal} rank {rank} {one.tensor}: {told}")
    return broken(found, broken_any_order)


def main() -> int:
    os.environ.setdefault("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    from nki_impl.lang import BACKEND
    from tests.nki_impl.reference import Case

    on_device = BACKEND == "device"
    world, rank = (
        int(os.environ.get(name, default)) if on_device else int(default)
        for name, default in (("WORLD_SIZE", "1"), ("RANK", "0"))
    )
    wrong = []
    for dtype in DTYPES:
        for causal in (False, True):
            case = Case(workers=world, length=256, dtype=dtype, causal=causal, seed=1)
            wrong += outside(case, rank, run(case, rank, on_device))
    print("\n".join(wrong) or f"rank {rank}: all within the any-order level ({BACKEND})")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
