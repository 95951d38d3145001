"""The error of bfloat16 outputs against the number of workers: these kernels, and a merge in bfloat16.

    python tests/benchmarks/nki_merge_error.py [--out docs/nki/merge_error.json]

The same tokens, dealt to 1, 2, 4 and 8 workers. For each: root mean square of o's error against float64,
in units of that of the correctly rounded o, so that 1 is the least possible; the mean over seeds. Of the
kernels on the simulator, of their recipe, and of ``nki``, the recipe of the public kernels, whose merge
is in bfloat16. Prints a table; ``--out`` writes the figures as JSON.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
WORKERS = (1, 2, 4, 8)
MASKS = {"full": {}, "causal": {"causal": True}, "striped": {"causal": True, "striped": True}}
COLUMNS = ("kernels", "recipe nki_impl_bf16", "recipe nki")


def whole(seed: int, tokens: int, heads: int, width: int, causal: bool) -> Any:
    """Normal q, k, v, dy [1, h, S, d] in bfloat16, of scores of standard deviation 1.5."""
    import numpy as np

    from ringspec.formats import round_to

    rng = np.random.default_rng(seed)
    q, k, v, dy = rng.standard_normal((4, 1, heads, tokens, width))
    q = q * (1.5 / width**0.5 if causal else 1.5)
    return [round_to(x, "bfloat16") for x in (q, k, v, dy)]


def errors(workers: int, mask: str, seed: int, given: Any) -> dict[str, float]:
    """rms error of each column, in units of the rounding of o alone."""
    import numpy as np

    from ringspec.formats import load, round_to, store
    from ringspec.recipes import RECIPES
    from ringspec.rings.layouts import make_layout, shard, unshard
    from tests.nki_impl.prediction import forward, results, rings_of
    from tests.nki_impl.reference import Case, Inputs
    from tests.nki_impl.running import run_forward

    length = given.tokens // workers
    case = Case(workers, 1, given.heads, 1, length, given.width, seed=seed, **MASKS[mask])
    name = "striped" if case.striped else "contiguous"
    layout = make_layout(name, given.tokens, workers)
    tensors = whole(seed, given.tokens, given.heads, given.width, case.causal)
    held = [np.stack([store(x, "bfloat16") for x in shard(one, layout)]) for one in tensors]
    inputs = Inputs(*held, None, None)
    (ring,) = rings_of(case, inputs)
    truth = results(layout, forward(ring, RECIPES["float64"]))["o"]
    o = {
        "kernels": unshard([load(x) for x in run_forward(case, inputs).o], layout),
        "recipe nki_impl_bf16": results(layout, forward(ring, RECIPES["nki_impl_bf16"]))["o"],
        "recipe nki": results(layout, forward(ring, RECIPES["nki"]))["o"],
    }
    least = np.sqrt(((round_to(truth, "bfloat16") - truth) ** 2).mean())
    return {name: float(np.sqrt(((x - truth) ** 2).mean()) / least) for name, x in o.items()}


def measured(given: Any) -> dict[str, Any]:
    """The figures of all masks and workers."""
    rows = []
    for mask in MASKS:
        for workers in WORKERS:
            found = [errors(workers, mask, seed, given) for seed in range(given.seeds)]
            means = {name: round(sum(x[name] for x in found) / len(found), 4) for name in COLUMNS}
            rows.append({"mask": mask, "workers": workers, **means})
    setting = {name: getattr(given, name) for name in ("tokens", "heads", "width", "seeds")}
    return {
        "unit": "rms error of o / rms error of the correctly rounded o",
        **setting,
        "rows": rows,
    }


def table(found: dict[str, Any]) -> str:
    lines = [f"{'mask':8s}  W  " + "  ".join(COLUMNS)]
    for row in found["rows"]:
        cells = "  ".join(f"{row[name]:{len(name)}.3f}" for name in COLUMNS)
        lines.append(f"{row['mask']:8s}  {row['workers']}  {cells}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = measured(given)
    print(table(found))
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
