"""SGLang's and vLLM's Triton merges against their recipes, on a GPU: shares of equal bits.

    python3 tests/gpu/check_merges.py --out DIR [--sglang FOLDER] [--vllm FOLDER [FOLDER ...]]

A folder is that of the package, installed or of a checkout, such as .../site-packages/vllm. Each recipe is evaluated with the
functions and the division of Triton, with torch's functions, and with correctly rounded ones, and with other contractions.
Writes merges.json. Exit status 1 if a recipe with Triton's functions does not give every bit.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
import triton  # noqa: E402
from merges.triton_comparison import candidates, certain_bits, compared  # noqa: E402
from merges.triton_mergers import (  # noqa: E402
    MERGERS,
    torch_functions_on_the_gpu,
    triton_functions,
)

from ringspec.merges.enclosures import ROUNDED  # noqa: E402


def one_merger(name, merger):
    """Shares of equal bits for each candidate and each set of functions; 'exact' names the candidate with every bit."""
    row = {"exact": ""}
    for label, recipe in candidates(name).items():
        known = certain_bits(merger, recipe.name)
        row[f"{label}, certain"] = dataclasses.asdict(known)
        print(
            f"{name}, {label}: certain bits that differ {known.differing} {known.first}", flush=True
        )
        for functions in (triton_functions(), torch_functions_on_the_gpu(), ROUNDED):
            found = compared(merger, recipe, functions)
            row[f"{label}, {functions.name}"] = {k: dataclasses.asdict(x) for k, x in found.items()}
            if functions.name == "Triton" and not any(
                sum(x.differing.values()) for x in found.values()
            ):
                row["exact"] = label
            for k, x in found.items():
                shares = [f"{key} {x.equal[key] / x.compared[key]:.3%}" for key in x.compared]
                print(f"  {functions.name}, {k}: {'; '.join(shares)} {x.first}", flush=True)
    print("  exact:", row["exact"], flush=True)
    return row


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sglang", type=Path, nargs="*", default=[])
    parser.add_argument("--vllm", type=Path, nargs="*", default=[])
    given = parser.parse_args()
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    rows = []
    for name, (package, make) in MERGERS.items():
        for folder in getattr(given, package):
            row = one_merger(name, make(folder))
            rows.append({"recipe": name, "folder": str(folder), **row})
    versions = {"torch": torch.__version__, "triton": triton.__version__, "gpu": gpu}
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "merges.json").write_text(
        json.dumps({"versions": versions, "rows": rows}, indent=1)
    )
    return 0 if rows and all(row["exact"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
