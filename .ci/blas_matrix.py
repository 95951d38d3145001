"""Regenerate cases of the core set under other BLAS kernels, thread counts and SIMD extensions.

    python .ci/blas_matrix.py [--set SET] [--sample N] [--only PATTERN]

Each arrangement runs in a process of its own, which says what BLAS and NumPy really used and prints
the content digest of each case. All digests must be equal, and equal to those of the packaged set. An
arrangement that this processor lacks is named and left out; Nehalem and NumPy without dispatch run on
every x86 processor. Exit code 1 on a difference, or if an arrangement was not in force.
"""

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from arrangements import arrangements, faults, in_force


def spread(ids, count):
    """``count`` ids at equal distances, the first and the last among them.

    >>> spread(["a", "b", "c", "d", "e"], 3), spread(["a", "b"], 5)
    (['a', 'c', 'e'], ['a', 'b'])
    """
    if count >= len(ids):
        return list(ids)
    step = (len(ids) - 1) / max(count - 1, 1)
    return [ids[round(n * step)] for n in range(count)]


def child(name, ids):
    """Derive the cases and print what was used and what came out, as one JSON document."""
    from ringspec.vectors import open_set
    from ringspec.vectors.format.digest import case_digest
    from ringspec.vectors.generate import derive

    digests = {}
    core = open_set(name)
    for id in ids:
        derived = derive(core.case(id))
        digests[id] = case_digest(derived.case, derived.tensors)
    print(json.dumps({"used": in_force(), "digests": digests}))


def run(name, vectors, ids, environment):
    """The document of one arrangement; None where it failed, which is printed."""
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, __file__, "--child"],
        input=json.dumps([vectors, ids]),
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
    if result.returncode != 0:
        print(f"  exit code {result.returncode}\n{result.stderr[-2000:]}")
        return None
    return json.loads(result.stdout)


def differences(name, digests, pinned):
    """A sentence if cases of one arrangement differ from the set.

    >>> differences("one", {"a": "1", "b": "2"}, {"a": "1", "b": "3"})
    ['one: 1 cases differ from the set: b']
    """
    wrong = [id for id, digest in digests.items() if digest != pinned[id]]
    if not wrong:
        return []
    return [f"{name}: {len(wrong)} cases differ from the set: {', '.join(wrong[:5])}"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=60, help="how many cases")
    parser.add_argument("--set", default="core", help="a packaged set or a folder")
    parser.add_argument("--only", default="*", help="pattern of ids")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(*json.load(sys.stdin))
        return 0

    from ringspec.vectors import open_set

    core = open_set(given.set)
    ids = spread([id for id in core.ids if fnmatch.fnmatchcase(id, given.only)], given.sample)
    pinned = {id: core.entry(id).content for id in ids}
    chosen, found = list(arrangements()), []
    # As many at once as there are cores; idle threads of BLAS sleep.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        documents = list(
            pool.map(lambda one: run(one.name, given.set, ids, one.environment), chosen)
        )
    for one, document in zip(chosen, documents, strict=True):
        if document is None:
            found.append(f"{one.name}: failed")
        else:
            found += faults(one, document["used"])
            found += differences(one.name, document["digests"], pinned)
    print(f"{len(ids)} cases in {len(chosen)} arrangements, {len(found)} faults")
    print("\n".join(found))
    return 1 if found or not ids else 0


if __name__ == "__main__":
    sys.exit(main())
