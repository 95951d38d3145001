"""PyTorch autograd in float64 on a naive formulation: a third opinion beside the mpmath oracle.

The formulation is written here, from the definition, with PyTorch operations alone (only the
keep mask of dropout comes from the oracle's Philox). Both sides are float64, each of them a few
1e-16 of the row scale from the truth.
"""

from dataclasses import replace

import numpy as np
import pytest
from oracle.cases import CASES, Case, Data, draw
from oracle.philox import keep_array
from oracle.problem import nearest_inverse_root
from oracle.row_scale import row_scale, worst_row_error

import ringspec as rs

pytestmark = pytest.mark.torch
BOUND = 5e-15

LARGER = tuple(
    replace(case, name=f"{case.name} (larger)", B=2, H=6, Hkv=3, Sq=33, Sk=33, D=16, Dv=24)
    for case in CASES
    if case.name
    in (
        "plain",
        "causal",
        "causal window",
        "segments",
        "key bounds",
        "dense mask [Sq, Sk]",
        "bias with masked pairs",
        "bias per head and key",
        "softcap with bias",
        "three sinks per head",
        "dropout",
        "given keep mask",
        "positions per batch with a window",
        "peaked rows",
    )
)


def visible_pairs(torch, data: Data):
    """The mask of the definition: bool [B, H, Sq, Sk], and the positions [B or 1, S]."""
    options = data.options
    B, H, Sq, _ = data.q.shape
    Sk = data.k.shape[2]
    pq = torch.arange(Sq) + options.get("q_offset", 0)
    pk = torch.arange(Sk)
    if "positions_q" in options:
        pq = torch.as_tensor(options["positions_q"])
    if "positions_k" in options:
        pk = torch.as_tensor(options["positions_k"])
    pq, pk = pq.reshape(-1, 1, Sq, 1), pk.reshape(-1, 1, 1, Sk)
    visible = torch.ones(B, H, Sq, Sk, dtype=torch.bool)
    if options.get("causal"):
        visible = visible & (pk <= pq)
    if "window" in options:
        window = options["window"]
        left, right = window if isinstance(window, tuple) else (window, window)
        if left is not None:
            visible = visible & (pk >= pq - left)
        if right is not None:
            visible = visible & (pk <= pq + right)
    if "segments_q" in options:
        segments_q = torch.as_tensor(options["segments_q"]).reshape(-1, 1, Sq, 1)
        segments_k = torch.as_tensor(options.get("segments_k", options["segments_q"]))
        visible = visible & (segments_q == segments_k.reshape(-1, 1, 1, Sk)) & (segments_q >= 0)
    if "cu_seqlens" in options:
        document_q = documents(torch, options["cu_seqlens"], Sq).reshape(Sq, 1)
        document_k = documents(torch, options.get("cu_seqlens_k", options["cu_seqlens"]), Sk)
        visible = visible & (document_q == document_k) & (document_q >= 0)
    if "bound_min" in options:
        visible = visible & (pk >= torch.as_tensor(options["bound_min"]).reshape(-1, 1, Sq, 1))
        visible = visible & (pk < torch.as_tensor(options["bound_max"]).reshape(-1, 1, Sq, 1))
    if "mask" in options:
        visible = visible & torch.as_tensor(options["mask"])
    if "bias" in options:
        visible = visible & (torch.as_tensor(options["bias"]) != -torch.inf)
    return visible, pq.reshape(-1, Sq), pk.reshape(-1, Sk)


def documents(torch, offsets, S: int):
    """Document number of each token, -1 behind the last offset."""
    lengths = torch.diff(torch.as_tensor(offsets))
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return torch.cat([numbers, torch.full((S - len(numbers),), -1)])


def kept_factor(torch, data: Data, pq, pk):
    """keep / (1 - dropout_p), broadcastable to [B, H, Sq, Sk]."""
    options = data.options
    dropout_p = options.get("dropout_p", 0.0)
    B, H = data.q.shape[:2]
    if "keep" in options:
        keep = torch.as_tensor(options["keep"])
    elif dropout_p > 0.0:
        seed = options.get("dropout_seed", 0)
        positions = (pq.numpy(), pk.numpy(), np.arange(H), np.arange(B))
        keep = torch.as_tensor(keep_array(*positions, dropout_p, seed))
    else:
        keep = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    return keep.to(torch.float64) / (1.0 - dropout_p)


def naive(torch, data: Data, leaves: dict):
    """o, lse and which rows are not empty, from tensors `leaves` that record gradients."""
    options = data.options
    B, H, Sq, D = data.q.shape
    visible, pq, pk = visible_pairs(torch, data)
    group = H // data.k.shape[1]
    k = leaves["k"].repeat_interleave(group, dim=1)
    v = leaves["v"].repeat_interleave(group, dim=1)
    scale = options.get("scale")
    s = torch.matmul(leaves["q"], k.transpose(2, 3))
    s = s * (nearest_inverse_root(D) if scale is None else scale)
    if "bias" in leaves:  # masked entries become 0 here, -inf below; their gradient is 0
        s = s + torch.where(torch.isneginf(leaves["bias"]), 0.0, leaves["bias"])
    if "softcap" in options:
        s = options["softcap"] * torch.tanh(s / options["softcap"])
    s = torch.where(visible, s, -torch.inf)
    if "sinks" in leaves:
        sinks = leaves["sinks"].reshape(1, H, 1, -1)
        s = torch.cat([s, sinks.expand(B, H, Sq, sinks.shape[3])], dim=3)
    nonempty = (s > -torch.inf).any(dim=3)
    s = torch.where(nonempty[..., None], s, 0.0)  # no NaN in the gradient of empty rows
    p = torch.softmax(s, dim=3)[..., : data.k.shape[2]]
    p = torch.where(visible, p, 0.0)
    o = torch.matmul(p * kept_factor(torch, data, pq, pk), v)
    lse = torch.where(nonempty, torch.logsumexp(s, dim=3), -torch.inf)
    return o, lse, nonempty


def by_autograd(data: Data) -> dict:
    """o, lse and every gradient as NumPy arrays."""
    import torch

    leaves = {"q": data.q, "k": data.k, "v": data.v}
    leaves |= {name: data.options[name] for name in ("sinks", "bias") if name in data.options}
    leaves = {name: torch.tensor(array, requires_grad=True) for name, array in leaves.items()}
    assert all(leaf.dtype == torch.float64 for leaf in leaves.values())
    o, lse, nonempty = naive(torch, data, leaves)
    loss = (torch.as_tensor(data.dy) * o).sum()
    if data.dlse is not None:
        loss = loss + (torch.as_tensor(data.dlse)[nonempty] * lse[nonempty]).sum()
    loss.backward()
    result = {"o": o.detach().numpy(), "lse": lse.detach().numpy()}
    return result | {f"d{name}": leaf.grad.numpy() for name, leaf in leaves.items()}


@pytest.mark.parametrize("case", CASES + LARGER, ids=lambda case: case.name)
def test_forward_and_gradients_agree_with_autograd(case: Case):
    data = draw(case)
    want = by_autograd(data)
    f = rs.attention(data.q, data.k, data.v, **data.options)
    g = rs.attention_backward(data.q, data.k, data.v, data.dy, dlse=data.dlse, **data.options)
    got = {"o": f.o, "lse": f.lse, "dq": g.dq, "dk": g.dk, "dv": g.dv}
    got |= {"dsinks": g.dsinks} if "dsinks" in want else {}
    got |= {"dbias": g.dbias} if "dbias" in want else {}
    assert got.keys() == want.keys()
    scale = row_scale(data.q, data.k, data.v, data.dy, data.dlse, **data.options)
    errors = {name: worst_row_error(got[name], want[name], getattr(scale, name)) for name in want}
    for name, error in errors.items():
        assert error <= BOUND, (name, errors)
