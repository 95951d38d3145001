"""``cp_program.py`` as a program of the command protocol, without ringspec: ``python tests/independent/cp_command.py``.

``ringspec check cmd:"python tests/independent/cp_command.py [FAULT]" --profile smoke``
"""

import json
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
from independent.cp_program import Program

CLAIMS = {
    "operations": ["context_parallel-forward", "context_parallel-backward"],
    "schemes": ["ring", "ulysses", "usp", "joint", "dcp", "pcp"],
    "meshes": ["ring", "ulysses", "ring x ulysses", "ulysses x ring", "dcp", "tp x dcp", "pcp"],
    "layouts": ["contiguous", "zigzag", "zigzag_per_document", "zigzag_padded"],
    "masks": ["causal", "documents"],
    "features": ["replicated-tokens", "kv-replicas", "padded-documents", "empty-ranks", "multi-token-decode", "prefix"],
    "formats": ["float32"],
    "batch": [1],
}  # fmt: skip
DTYPES = {"F32": np.float32, "I64": np.int64}
TABLES = ("index_q", "index_k", "heads_q", "heads_k", "position_q", "position_k")


def read(path):
    """The tensors of a safetensors file."""
    data = Path(path).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    found = {}
    for name, one in header.items():
        first, last = (8 + size + at for at in one["data_offsets"])
        found[name] = np.frombuffer(data[first:last], DTYPES[one["dtype"]]).reshape(one["shape"])
    return found


def write(path, tensors):
    """Write float32 tensors to a safetensors file."""
    header, data = {}, b""
    for name, x in tensors.items():
        raw = np.ascontiguousarray(x, np.float32).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "F32", "shape": list(x.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + data)


def answer(message, fault=None):
    """Compute one call and write its result."""
    tensors = read(message["inputs"])
    job = {name: message[name] for name in ("scheme", "mesh", "terms")}
    for name in TABLES:
        table = tensors.pop(name)
        job[name] = (table[:, 0] if name.startswith("position") else table).tolist()
    job |= {name: list(x[:, 0].astype(np.float64)) for name, x in tensors.items()}
    with np.errstate(all="ignore"):
        found = Program(job, fault).run()
    write(message["result"], {name: np.stack(x)[:, None] for name, x in found.items()})


def main(fault=None):
    for line in sys.stdin:
        message = json.loads(line)
        if message["kind"] == "hello":
            said = {"kind": "hello", "name": "command", "capabilities": CLAIMS}
        else:
            answer(message, fault)
            said = {"kind": "result"}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
