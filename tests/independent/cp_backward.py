"""The backward pass of ``cp_program.py``: gradients of blocks, added on their way home."""

import numpy as np
from independent.cp_math import gradients, key_heads


def backward(program, wide, axis, parts, results):
    """dq, dk, dv of each rank, from the results of the forward pass."""
    rows, keys, text = wide
    fault, ring = program.fault, program.size("ring")
    dq = [np.zeros_like(pile.x["q"]) for pile in rows]
    own = [[np.zeros_like(pile.x[x]) for x in ("k", "v")] for pile in keys]
    of_text = [[np.zeros_like(pile.x[x]) for x in ("k", "v")] for pile in text]
    for r in program.ranks:
        for number, block in enumerate(program.blocks(r, wide)):
            computed = block
            if fault == "backward-local-keys" and block[1] is not None:
                computed = (keys[r], r, False)
            o, lse = parts[r][number] if fault == "backward-block-lse" else results[r]
            mask = program.allowed(rows[r], computed, r)
            if program.at(r, "ring") > 0 and fault != "text-rows-of-every-copy":
                mask[: program.text] = False  # the copies at coordinate 0 are differentiated
            slots = key_heads(rows[r].heads, computed[0], program.key_head)
            steps = gradients(
                rows[r], computed[0], mask, slots, program.scale, lse, o, program.extra
            )
            dq[r] += steps[0]
            target = of_text[r] if block[1] is None else own[block[1]]
            for total, step in zip(target, steps[1:], strict=True):
                total += step
    if fault == "gradient-one-hop-short":
        own = [own[program.moved(r, "ring", 1)] for r in program.ranks]
    if program.text and ring > 1:
        dq, of_text = text_added(program, dq, of_text)
    dk, dv = (
        [np.concatenate([t[n], x[n]], axis=1) for t, x in zip(of_text, own, strict=True)]
        for n in (0, 1)
    )
    if axis is not None:
        return {"dq": dq, "dk": scattered(program, axis, dk), "dv": scattered(program, axis, dv)}
    piles = keys
    return {
        "dq": program.home(dq, rows),
        "dk": program.home(dk, piles, add=True),
        "dv": program.home(dv, piles, add=True),
    }


def text_added(program, dq, of_text):
    """Text gradients of all ring coordinates, added: all of them for every copy."""
    n, fault = program.text, program.fault
    whole_q, whole_k = [], []
    for r in program.ranks:
        members = program.members(r, "ring")
        x = dq[r].copy()
        if fault != "text-rows-of-every-copy":
            x[:, :n] = sum(dq[m][:, :n] for m in members)
        whole_q.append(x)
        shared = [r] if fault == "text-dk-own-part" else members
        whole_k.append([sum(of_text[m][i] for m in shared) for i in (0, 1)])
    return whole_q, whole_k


def scattered(program, axis, x):
    """Gradients of gathered keys, added over the group; each rank keeps those of its own keys."""
    found = []
    for r in program.ranks:
        members = program.members(r, axis)
        each = x[r].shape[1] // len(members)
        at = slice(members.index(r) * each, (members.index(r) + 1) * each)
        adding = [r] if program.fault == "gathered-dk-own-rows" else members
        found.append(sum(x[m][:, at] for m in adding))
    return found
