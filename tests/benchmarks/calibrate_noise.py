"""Record how well the noise model predicts: random problems against the specification's ring.

    python tests/benchmarks/calibrate_noise.py [--problems 240] [--seed 3]

Prints, for each recipe and tensor, the ratio rms of error / predicted: its median and extremes over
problems, and the largest error in units of its bound; a line for each ratio outside its limits. The ratio
is the root mean square, over the elements whose predicted standard deviation is not 0, of error / standard
deviation. dsinks has 4 or 8 elements, whose ratio scatters by itself; its median counts.
"""

import argparse
import collections
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from compare.noise_problems import compare, limits, random_case

from ringspec.recipes import RECIPES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=240)
    parser.add_argument("--seed", type=int, default=3)
    given = parser.parse_args()
    ratios, worst = collections.defaultdict(list), collections.defaultdict(float)
    began = time.monotonic()
    for number in range(given.problems):
        case, described = random_case(number, given.seed)
        for name, (ratio, of_bound, exact) in compare(case).items():
            key = described["used"], name
            ratios[key].append(ratio)
            worst[key] = max(worst[key], of_bound)
            low, high = limits(described["used"], name)
            low, high = (0.0, 9.0) if name == "dsinks" else (low, high)
            if not (low <= ratio <= high and of_bound <= 1 and exact < 1e-30):
                print(
                    f"{number}: {name} {ratio:.2f} bound {of_bound:.2f} exact {exact:.0e} {described}"
                )
    names = ("o", "lse", "dq", "dk", "dv", "dsinks", "dbias")
    print(f"{given.problems} problems, {time.monotonic() - began:.0f} s")
    for used in RECIPES:
        cells = [f"{used:14s}"]
        for name in names:
            got = ratios[used, name]
            text = "-"
            if got:
                text = (
                    f"{np.median(got):.2f} ({min(got):.2f}..{max(got):.2f}) {worst[used, name]:.2f}"
                )
            cells.append(f"{text:24s}")
        print(" ".join(cells).rstrip())


if __name__ == "__main__":
    main()
