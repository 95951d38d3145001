"""Small sets for the tests of the container: every operation and storage, values that mean nothing."""

import json

import numpy as np

from ringspec.tensorfile import DTYPES
from ringspec.vectors import write_set
from ringspec.vectors.format.case import (
    Case,
    CaseFormats,
    Inputs,
    Patch,
    Ring,
    Shape,
    TensorRecipe,
    Withdrawn,
)
from ringspec.vectors.format.digest import set_digest, sha256
from ringspec.vectors.format.flag import Flag
from ringspec.vectors.format.tensor_table import stored_tensors, whole_tensors

FLAGS = {
    "stale-keys": Flag("stale-keys", "schedule", "Wrong.", ("https://example.org/1",), ("fixed",)),
    "lost-sink": Flag("lost-sink", "sinks", "No sink in the denominator."),
}
DRAWN = TensorRecipe("uniform", bits=4, exponent=-3, head=1, shard=2, shards=4)


def make(id, operation, passes, shape, names, **changes):
    recipes = dict.fromkeys(names, DRAWN) | changes.pop("recipes", {})
    fields = {
        "id": id,
        "reason": "a small case for a test",
        "operation": operation,
        "passes": passes,
        "rules": ("FWD-1", "RING-1"),
        "flags": ("stale-keys",),
        "shape": Shape(*shape) if shape else None,
        "formats": CaseFormats("bfloat16", "bfloat16", "float32") if shape else None,
        "terms": {"scale": 0.35355339059327373} if operation not in ("merge", "schedule") else {},
        "ring": None,
        "inputs": Inputs(id, recipes),
        "storage": "full",
        "requires": {"formats": ["bfloat16"], "workers": 2, "dropout": False},
    }
    return Case(**fields | changes)


def attention():
    recipes = {
        "bias": TensorRecipe(
            "uniform",
            shape=(1, 2, 1, 6),
            bits=3,
            exponent=-1,
            patches=(Patch((0, None, 0, (1, 3)), set="-inf"), Patch((0, 1, 0, 0), multiply=0.25)),
        ),
        "sinks": TensorRecipe("values", values=[[0.5], [-1.0]]),
        "mask": TensorRecipe("bernoulli", shape=(1, 1, 4, 6), threshold=64),
        "segments_q": TensorRecipe("values", values=[0, 0, 1, -1]),
        "segments_k": TensorRecipe("constant", shape=(6,), value=0),
    }
    both = ("forward", "backward")
    names = ("q", "k", "v", "dy", "dlse")
    terms = {"scale": 0.5, "causal": True, "window": [3, None], "softcap": 2.0, "q_offset": 2}
    shape = (1, 2, 1, 4, 6, 8, 4)
    return make(
        "attention/everything", "attention", both, shape, names, recipes=recipes, terms=terms
    )


def ring(id="ring/zigzag-sampled-w2", **changes):
    names, both = ("q", "k", "v", "dy"), ("forward", "backward")
    return make(id, "ring", both, (1, 2, 2, 8, 8, 4, 4), names, **changes)


def cases():
    """One of each kind; those with digests have them filled in."""
    table = [[0, 2, -1, 7], [1, 3, 4, -1], [5, 6, -1, -1]]
    sinks = {"sinks": TensorRecipe("values", values=[[1.0, 2.0], [3.0, -4.0]])}
    bias = {"bias": TensorRecipe("constant", shape=(1, 1, 1, 8), value=0.0)}
    zigzag = Ring(2, "zigzag")
    both = ("forward", "backward")
    packed = {"scale": 1.0, "cu_seqlens": (0, 3, 6), "dropout_p": 0.25, "dropout_seed": 7}
    by_document = Ring(2, "zigzag_per_document", circulation="q", direction=-1)
    plain = (
        attention(),
        ring("ring/table-w3", ring=Ring(3, "table", table_q=table), recipes=sinks | bias),
        ring("ring/packed-w2", ring=by_document, terms=packed),
        make(
            "ring/two-tables", "ring", ("forward",), (1, 2, 2, 4, 2, 4, 4), ("q", "k", "v"),
            ring=Ring(2, "table", table_q=[[0, 3], [2, 1]], table_k=[[1], [0]]),
        ),
        make(
            "block/backward", "block", ("backward",), (1, 2, 1, 3, 5, 4, 4),
            ("q", "k", "v", "dy", "lse", "delta"),
        ),
        make("merge/three", "merge", ("forward",), (2, 2, 2, 3, 3, 4, 4), ("parts_o", "parts_lse")),
        make("schedule/q-ring", "schedule", both, None, (), ring=Ring(3, "contiguous", "q")),
        make(
            "attention/old/withdrawn", "attention", ("forward",), (1, 1, 1, 2, 2, 2, 2),
            ("q", "k", "v"), withdrawn=Withdrawn("1.1", "it was wrong"),
        ),
    )  # fmt: skip
    pinned = (
        ring("ring/zigzag-sampled-w2", ring=zigzag, storage="sampled", recipes=sinks),
        ring("kernel/zigzag-w2", ring=zigzag, storage="digests"),
    )
    return plain + tuple(with_digests(case) for case in pinned)


def with_digests(case):
    digests = {name: f"{n:064x}" for n, name in enumerate(sorted(whole_tensors(case)))}
    return Case(**dict(vars(case)) | {"digests": digests})


def tensors(case, seed=0):
    """Tensors of the right names, dtypes and shapes; None where a case stores none."""
    if case.storage == "digests":
        return None
    stream = np.random.default_rng(seed)
    made = {}
    for name, entry in stored_tensors(case).items():
        free = 1 if name.startswith("position") else 3
        shape = tuple(free if n is None else n for n in entry.axes)
        dtype = DTYPES[entry.code]
        made[name] = stream.integers(0, 2 if entry.code == "BOOL" else 9, shape).astype(dtype)
    return made


def entries():
    return [(case, tensors(case)) for case in cases()]


def write(path, given=None, **changes):
    """A set at a path; returns it opened."""
    fields = {"name": "sample", "set_version": "1.0", "flags": FLAGS} | changes
    return write_set(path, entries=entries() if given is None else given, **fields)


def manifest(root):
    return json.loads((root / "manifest.json").read_text())


def relisted(root, change=lambda data: None):
    """Write sizes, hashes and sums of the manifest anew, then change it."""
    data = manifest(root)
    for id, entry in data["cases"].items():
        for name in entry["files"]:
            raw = (root / id / name).read_bytes()
            entry["files"][name] = {"bytes": len(raw), "sha256": sha256(raw)}
    raw = (root / "flags.json").read_bytes()
    data["flags"] = {"bytes": len(raw), "sha256": sha256(raw)}
    summed(data)
    change(data)
    (root / "manifest.json").write_text(json.dumps(data))


def summed(data):
    data["count"] = len(data["cases"])
    sizes = [file["bytes"] for case in data["cases"].values() for file in case["files"].values()]
    data["bytes"] = sum(sizes) + data["flags"]["bytes"]
    data["content"] = set_digest({id: case["content"] for id, case in data["cases"].items()})
