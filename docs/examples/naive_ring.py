"""A simple ring attention for the protocol of cmd: (docs/conform/protocol.md). Needs NumPy 2."""

import json
import sys

import numpy as np

DTYPES = {"F32": "<f4", "BF16": "<u2", "I64": "<i8"}
CLAIMS = {"layouts": ["contiguous", "striped", "zigzag"], "masks": ["causal"], "head_ratios": [1]}
CLAIMS |= {"formats": ["float32", "bfloat16"], "features": ["scale", "unequal-lengths"]}


def read(path):
    data, tensors = open(path, "rb").read(), {}
    start = 8 + int.from_bytes(data[:8], "little")
    for name, of in json.loads(data[8:start]).items():
        x = np.ndarray(of["shape"], DTYPES[of["dtype"]], data, start + of["data_offsets"][0])
        tensors[name] = (x.astype("<u4") << 16).view("<f4") if x.dtype == "<u2" else x
    return tensors


def write(path, tensors, outputs):
    header, body = {}, b""
    for name, x in tensors.items():
        bits, code = np.ascontiguousarray(x, "<f4").view("<u4"), "F32"
        if name != "lse" and outputs == "bfloat16":  # to nearest, ties to even
            bits, code = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2"), "BF16"
        span = [len(body), len(body) + bits.nbytes]
        header[name] = {"dtype": code, "shape": x.shape, "data_offsets": span}
        body += bits.tobytes()
    text = json.dumps(header).encode()
    open(path, "wb").write(len(text).to_bytes(8, "little") + text + body)


def ring(x, scale, causal=False):
    """Arrays [W, B, H, n, d], positions [W, 1 or B, n]: what each worker holds."""
    q, k, v, dy = (np.float64(x.get(name, 0)) for name in ("q", "k", "v", "dy"))
    at_q, at_k = x["position_q"][:, :, None, :, None], x["position_k"]
    m, l, o, dq, dk, dv = np.full((*q.shape[:4], 1), -1e30), 0.0, 0.0, 0.0, 0 * k, 0 * v
    for step in range(len(q) * (2 if "dy" in x else 1)):
        s = np.where((at_k[:, :, None, None] > at_q) & causal, -np.inf, scale * q @ k.mT)
        if step < len(q):  # once around for the forward pass
            new = np.maximum(m, s.max(axis=4, keepdims=True))
            old, p, m = np.exp(m - new), np.exp(s - new), new
            l, o = l * old + p.sum(axis=4, keepdims=True), o * old + p @ v
        else:  # and again for the backward pass; dk and dv travel along, back to their owner
            p = np.exp(s - m) / l
            ds = scale * p * (dy @ v.mT - (dy * o / l).sum(axis=4, keepdims=True))
            dq, dk, dv = dq + ds @ k, dk + ds.mT @ q, dv + p.mT @ dy
        k, v, at_k, dk, dv = (np.roll(x, 1, axis=0) for x in (k, v, at_k, dk, dv))
    gradients = {"dq": dq, "dk": dk, "dv": dv} if "dy" in x else {}
    return {"o": o / l, "lse": (m + np.log(l))[..., 0]} | gradients


for line in sys.stdin:
    call, answer = json.loads(line), {"kind": "hello", "name": "naive", "capabilities": CLAIMS}
    if call["kind"] == "call":
        answer, result = {"kind": "result"}, ring(read(call["inputs"]), **call["terms"])
        write(call["result"], result, call["formats"]["outputs"])
    print(json.dumps(answer), flush=True)
