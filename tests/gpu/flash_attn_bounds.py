"""Attention of one sequence in dense float64, and how far the results of a kernel may be from it, without ringspec.

Two recipes. 'kernel' is FlashAttention 2: products and sums in float32, P and dS rounded to 16 bits before they are
multiplied, each result rounded once, and dk and dv of each query head rounded before heads that share keys are added.
'exact' rounds each result once and nothing else. A bound is the worst case to first order for each element: each
rounding moves a number by at most half a unit in the last place, all in the same direction. Sums in float32 count
2^-23 for each term, because tensor cores cut off instead of rounding.
"""

import math

import torch

F32 = 2.0**-23
DIGITS = {torch.bfloat16: (8, -133), torch.float16: (11, -24), torch.float32: (24, -149)}
F64 = 2.0**-44  # of the sum of absolute terms, for float64 itself
MORE = 1.02  # for products of errors, which are left out


def visible(queries, keys, causal, window, longest):
    """Which key each query sees, as FlashAttention 2 decides it: query and key are aligned at the last ones.

    ``longest``: the keys of the longest sequence. A side of a window with -1, or at least that long, has no limit; if
    only one side has none, its limit is ``longest``, which matters for rows before the first key.
    """
    left, right = (-1 if side >= longest else side for side in window)
    right = 0 if causal else right
    if left < 0 and right < 0:
        return torch.ones(queries, keys, dtype=torch.bool)
    left, right = (longest if side < 0 else side for side in (left, right))
    i = torch.arange(queries)[:, None] + keys - queries
    j = torch.arange(keys)[None, :]
    return (j >= i - left) & (j <= i + right)


def without_last_key(seen):
    """The mask with the last key of each row taken away, if the row has others: what a result must not fit."""
    last = seen & (seen.flip(1).cumsum(1).flip(1) == 1)
    return seen & ~(last & (seen.sum(1, keepdim=True) > 1))


def half_unit(x, dtype):
    """Half a unit in the last place of x in a dtype, for the rounding of a result."""
    digits, smallest = DIGITS[dtype]
    _, exponent = torch.frexp(x.abs())
    return torch.ldexp(torch.ones_like(x), torch.clamp(exponent - digits, min=smallest) - 1)


def by_heads(x, heads):
    """[rows, Hkv, D] as float64 [H, rows, D]."""
    return x.double().transpose(0, 1).repeat_interleave(heads // x.shape[1], dim=0)


def forward(q, k, v, seen, scale, dtype, recipe):
    """{name: (value, bound)} of o [n, H, D] and lse [H, n]."""
    heads = q.shape[1]
    wide, keys, values = by_heads(q, heads), by_heads(k, heads), by_heads(v, heads)
    s = scale * wide @ keys.mT
    hidden = s.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(hidden, 2)
    none = lse == -math.inf
    p = torch.exp(hidden - lse.masked_fill(none, 0.0)[..., None])
    o = p @ values
    weight = p @ values.abs()
    found = {
        "o": (o, half_unit(o, dtype) + F64 * weight),
        "lse": (lse, half_unit(lse, torch.float32) + F64 * (1 + lse.abs())),
    }
    if recipe == "kernel":
        top = hidden.amax(2) if k.shape[0] else lse
        top = top.masked_fill(none, 0.0)[..., None]
        off = exponents_off(wide, keys, s, scale, top)
        whole = (p * off).sum(2, keepdim=True) + k.shape[0] * F32
        around = seen.double() @ values.abs()
        unit, least = rounding(dtype)
        noise = (unit + whole + k.shape[0] * F32) * weight + (p * off) @ values.abs()
        found["o"] = (o, found["o"][1] + MORE * noise + least * around)
        found["lse"] = (
            lse,
            found["lse"][1]
            + MORE * (whole[..., 0] + 8 * F32 * (1 + lse.abs() + top[..., 0].abs())),
        )
    o, bound = found["o"]
    value, room = found["lse"]
    found["lse"] = (value.masked_fill(none, math.inf), room.masked_fill(none, 0.0))
    found["o"] = (o.transpose(0, 1), bound.masked_fill(none[..., None], 0.0).transpose(0, 1))
    return found


def exponents_off(wide, keys, s, scale, base):
    """How far an exponent s - base may be off in float32."""
    sizes = scale * wide.abs() @ keys.abs().mT
    return F32 * (wide.shape[2] * sizes + 4 * s.abs() + 4 * base.abs() + 8)


def rounding(dtype):
    """The largest relative and absolute error of a rounding to 16 bits."""
    digits, smallest = DIGITS[dtype]
    return 2.0**-digits, 2.0 ** (smallest - 1)


def backward(dy, q, k, v, o, lse, seen, scale, dtype, recipe):
    """{name: (value, bound)} of dq [n, H, D], dk and dv [m, Hkv, D], with the o and the lse [H, n] given."""
    heads = q.shape[1]
    wide, keys, values = by_heads(q, heads), by_heads(k, heads), by_heads(v, heads)
    dout, out = by_heads(dy, heads), by_heads(o, heads)
    s = scale * wide @ keys.mT
    base = lse.double().masked_fill(lse == -math.inf, 0.0)[..., None]
    p = torch.exp(s.masked_fill(~seen, -math.inf) - base)
    difference = dout @ values.mT - (dout * out).sum(2, keepdim=True)
    ds = p * difference
    exact = {"dq": scale * ds @ keys, "dk": scale * ds.mT @ wide, "dv": p.mT @ dout}
    products = dout.abs() @ values.abs().mT + (dout * out).abs().sum(2, keepdim=True)
    unit, least = rounding(dtype)
    p_off, ds_off = F64 * p, F64 * p * products
    if recipe == "kernel":
        off = exponents_off(wide, keys, s, scale, base.masked_fill(base == math.inf, 0.0))
        ds_off = p * (off * difference.abs() + F32 * (q.shape[2] * products + difference.abs()))
        ds_off = ds_off + unit * ds.abs() + least * seen + max(seen.shape) * F32 * ds.abs()
        p_off = p * (off + unit + q.shape[0] * F32) + least * seen
    noise = {
        "dq": scale * ds_off @ keys.abs(),
        "dk": scale * ds_off.mT @ wide.abs(),
        "dv": p_off.mT @ dout.abs(),
    }
    if recipe == "kernel" and heads != k.shape[1]:
        for name in ("dk", "dv"):
            noise[name] = noise[name] + half_unit(exact[name], dtype)
    found = {}
    for name, x in exact.items():
        few = heads if name == "dq" else k.shape[1]
        group = (few, heads // few, *x.shape[1:])
        value, room = (y.reshape(group).sum(1) for y in (x, noise[name]))
        room = MORE * room + half_unit(value, dtype)
        found[name] = (value.transpose(0, 1), room.transpose(0, 1))
    return found
