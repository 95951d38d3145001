"""Infer the merge of public code and of recipes from the errors of o, and print a table of what was named.

    python tests/benchmarks/infer_merges.py [--problems 4] [--transformer-engine DIR ...] [--only torch_cp,te_thd]

Each problem is a ring of 2, 4 or 8 workers with exact blocks, 64 tokens and bfloat16 parts. The mergers are torch's,
ring_flash_attn's and TransformerEngine's own code, where they are installed (DIR: an unpacked wheel), and, of other merges,
the recipe itself. A cell counts what was concluded: 'named' (that class alone), 'among n' (n classes that are not told apart,
the right one among them), 'none', or 'wrong', a fault. Exit status 1 if there is a wrong name.
"""

from __future__ import annotations

import argparse
import collections
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

RECIPES = ("te_thd", "vllm_merge", "vllm_dcp_ag_rs", "nki_ring", "tokamax", "fa3")


def mergers(folders: list[Path]) -> Iterator[tuple[str, str, Callable | None]]:
    """What is run, the recipe that describes it, and its code (None: the recipe itself)."""
    from merges import real_mergers as real

    if importlib.util.find_spec("torch"):
        for name, wide in (("torch_cp", True), ("torch_cp_narrow", False)):
            yield f"torch {name}", name, functools.partial(real.torch_merger, wide=wide)
    if importlib.util.find_spec("ring_flash_attn"):
        yield "ring_flash_attn", "ring_flash_attn", real.ring_flash_attn_merger
    for folder in folders:
        engine = real.transformer_engine(folder / "transformer_engine")
        early = hasattr(engine, "flash_attn_fwd_out_correction_init")
        code = functools.partial(real.transformer_engine_merger, engine=engine)
        yield folder.name, "te_p2p" if early else "te_p2p_2_20", code
    for name in RECIPES:
        yield f"{name} (recipe)", name, None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--problems", type=int, default=4)
    parser.add_argument("--transformer-engine", type=Path, nargs="*", default=[])
    parser.add_argument("--only", help="recipes, separated by commas")
    args = parser.parse_args()
    from merges.inferring import inferred, label

    wrong = 0
    for what, name, code in mergers(args.transformer_engine):
        if args.only and name not in args.only.split(","):
            continue
        for workers in (2, 4, 8):
            found: collections.Counter[str] = collections.Counter()
            for seed in range(args.problems):
                one = inferred(name, workers, seed, code)
                if not one.names:
                    kind = "none"
                elif name not in one.names:
                    kind, wrong = f"wrong {label(one)}", wrong + 1
                elif len(one.words) == 1:
                    kind = "named"
                else:
                    kind = f"among {len(one.words)}"
                found[kind] += 1
            print(
                f"| {what} | {workers} | {', '.join(f'{k} {n}' for k, n in found.items())} |",
                flush=True,
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
