"""One block of attention in plain NumPy, with faults that can be switched on by name; as a block and as a dense kernel."""

import dataclasses

import numpy as np

from ringspec.conformance.target import Capabilities
from ringspec.conformance.target.protocol import Result

BLOCK = Capabilities(
    operations=("block-forward", "block-backward"), masks=("causal", "window"), head_ratios=(2,),
    features=("positions", "q-offset", "empty-rows"), formats=("float32",), workers=(3,),
)  # fmt: skip
DENSE = Capabilities(
    workers=(1,), circulations=("kv",), masks=("causal", "window"), head_ratios=(2,), formats=("float32",),
)  # fmt: skip
TILE = 4


class Block:
    """A target that computes one block, or a dense kernel with the claims DENSE; ``faults`` are switched on."""

    name = "block"

    def __init__(self, *faults, claims=BLOCK, **changes):
        self.faults = set(faults)
        self.capabilities = dataclasses.replace(claims, **changes)

    def run(self, call):
        if "raises" in self.faults:
            raise NotImplementedError("no such block")
        if "raises for an offset" in self.faults and call.position_q.min() > 0:
            raise NotImplementedError("no offset")
        inputs = {n: np.asarray(x[0][0], np.float64) for n, x in call.tensors.items()}
        inputs["position_q"], inputs["position_k"] = call.position_q[0, 0], call.position_k[0, 0]
        one = Computed(inputs, dict(call.terms), self.faults)
        found = {}
        if "forward" in call.passes:
            o, lse = one.forward()
            found |= {"o": o, "lse": lse}
        if "backward" in call.passes:
            if "lse" not in inputs:
                inputs["lse"], inputs["delta"] = lse, (inputs["dy"] * o).sum(axis=2)
            found |= one.backward()
        hidden = self.capabilities.lse == "hidden"
        return Result(
            **{
                n: [x[None].astype(np.float32)]
                for n, x in found.items()
                if not (hidden and n == "lse")
            }
        )


class Computed:
    """The passes of one block [H, n, D]; ``inputs`` are q, k, v, positions and, for the backward, dy, lse, delta."""

    def __init__(self, inputs, terms, faults):
        self.inputs, self.terms, self.faults = inputs, terms, faults
        H, kv = len(inputs["q"]), len(inputs["k"])
        h = np.arange(H)
        self.key_head = h % kv if "key heads mod Hkv" in faults else h // (H // kv)

    def scores(self):
        scale = 1.0 if "no scale" in self.faults else self.terms["scale"]
        scale = scale**2 if "scale twice" in self.faults else scale
        return scale * self.inputs["q"] @ self.inputs["k"][self.key_head].swapaxes(1, 2)

    def visible(self, phase):
        of_q, of_k = self.inputs["position_q"], self.inputs["position_k"]
        if "positions ignored" in self.faults:
            of_q, of_k = np.arange(len(of_q)), np.arange(len(of_k))
        gap = of_k[None, :] - of_q[:, None]
        shown = np.ones(gap.shape, bool)
        unmasked = "no mask" in self.faults or f"no mask in the {phase}" in self.faults
        if self.terms.get("causal") and not unmasked:
            shown &= gap <= ("one key too many" in self.faults)
        if self.terms.get("window") is not None:
            left, right = self.terms["window"]
            shown &= (gap >= -left + ("window too short" in self.faults)) & (gap <= right)
        if "last key lost" in self.faults and phase == "forward":
            shown[:, -1] = False
        return shown

    def forward(self):
        s, v = np.where(self.visible("forward"), self.scores(), -np.inf), self.inputs["v"]
        m = s.max(axis=2, keepdims=True)
        m = np.where(np.isneginf(m), 0.0, m)
        l, o = np.zeros(m.shape), np.zeros((*s.shape[:2], v.shape[2]))
        top = np.full(m.shape, -np.inf)
        for j in range(0, s.shape[2], TILE):  # the online softmax, a tile of keys after the other
            tile = s[:, :, j : j + TILE]
            new = np.maximum(top, tile.max(axis=2, keepdims=True))
            shift = np.where(np.isneginf(new), 0.0, new)
            rescale, p = np.exp(top - shift), np.exp(tile - shift)
            l = rescale * l + p.sum(axis=2, keepdims=True)
            part = p @ v[self.key_head][:, j : j + TILE]
            o = o + part if "o not rescaled" in self.faults else rescale * o + part
            top = new
        empty = l == 0
        if "o not divided" not in self.faults:
            with np.errstate(invalid="ignore"):
                o = o / l if "no guard" in self.faults else o / np.where(empty, 1.0, l)
        lse = m + np.log(np.where(empty, 1.0, l))
        lse = m if "lse is the maximum" in self.faults else lse
        if "lse in base 2" in self.faults:
            lse = lse / np.log(2.0)
        lse = np.where(empty, 0.0 if "lse of empty rows is 0" in self.faults else -np.inf, lse)
        return o, lse[..., 0]

    def backward(self):
        scale, faults, x = self.terms["scale"], self.faults, self.inputs
        q, k, v, dy = x["q"], x["k"][self.key_head], x["v"][self.key_head], x["dy"]
        lse, delta = x["lse"][..., None], x["delta"][..., None]
        s = np.where(self.visible("backward"), self.scores(), -np.inf)
        if "lse of the block" in faults:
            with np.errstate(divide="ignore"):
                lse = np.log(np.exp(s).sum(axis=2, keepdims=True))
        if "lse as if in base 2" in faults:
            lse = lse * np.log(2.0)
        with np.errstate(invalid="ignore"):
            p = np.where(np.isneginf(s), 0.0, np.exp(s - lse))
        dp = dy @ v.swapaxes(1, 2)
        if "delta of the block" in faults:
            delta = (p * dp).sum(axis=2, keepdims=True)
        if "no delta" in faults:
            delta = 0.0
        ds = p * (dp - delta)
        ds = ds if "ds without the scale" in faults else scale * ds
        turned = ds if "ds not transposed" in faults else ds.swapaxes(1, 2)
        own_q = np.roll(q, 1, axis=1) if "dk with the query before" in faults else q
        dk, dv = turned @ own_q, p.swapaxes(1, 2) @ dy
        kv = len(x["k"])
        into = np.eye(kv)[self.key_head].T  # [Hkv, H]
        if "dv of one head" in faults:
            into_v = into * (np.arange(len(q)) % (len(q) // kv) == 0)
        else:
            into_v = into
        return {
            "dq": (2 if "dq twice" in faults else 1) * ds @ k,
            "dk": np.einsum("ch,hjd->cjd", into, dk),
            "dv": np.einsum("ch,hjd->cjd", into_v, dv),
        }
