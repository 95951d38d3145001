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
from merges.triton_comparison import certain_bits, compared, variants  # noqa: E402
from merges.triton_mergers import (  # noqa: E402
    MERGERS,
    torch_functions_on_the_gpu,
    triton_functions,
)

from ringspec.merges.enclosures import ROUNDED  # noqa: E402


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sglang", type=Path, nargs="*", default=[])
    parser.add_argument("--vllm", type=Path, nargs="*", default=[])
    given = parser.parse_args()
    functions = [triton_functions(), torch_functions_on_the_gpu(), ROUNDED]
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    rows, wrong = [], 0
    for name, (package, make) in MERGERS.items():
        for folder in getattr(given, package):
            merger = make(folder)
            known = certain_bits(merger, name)
            row = {"recipe": name, "folder": str(folder), "certain": dataclasses.asdict(known)}
            print(
                f"{name} {folder}: certain bits differing {known.differing} {known.first}",
                flush=True,
            )
            for label, recipe in variants(name).items():
                for given_functions in functions:
                    found = compared(merger, recipe, given_functions)
                    row[f"{label}, {given_functions.name}"] = {
                        k: dataclasses.asdict(shares) for k, shares in found.items()
                    }
                    for k, shares in found.items():
                        parts = [
                            f"{key} {shares.equal[key] / shares.compared[key]:.3%}"
                            for key in shares.compared
                        ]
                        print(
                            f"  {label}, {given_functions.name}, {k}: {'; '.join(parts)} {shares.first}",
                            flush=True,
                        )
                        if label == "table" and given_functions.name == "Triton":
                            wrong += sum(shares.differing.values())
            rows.append(row)
    versions = {"torch": torch.__version__, "triton": triton.__version__, "gpu": gpu}
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "merges.json").write_text(
        json.dumps({"versions": versions, "rows": rows}, indent=1)
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
