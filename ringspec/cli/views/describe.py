"""Describe the problem that the user requests, as plain data and as the first two lines of the text."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringspec.cli.shared import options
from ringspec.problem.model import Problem


def problem_data(asked: options.Request, problem: Problem, backward: bool) -> dict[str, Any]:
    """Return the shapes and options of the problem as plain data."""
    terms, (batch, heads, n_q, width) = problem.terms, problem.q.shape
    return {
        "workers": asked.workers,
        "layout": asked.layout,
        "circulation": asked.circulation,
        "direction": asked.direction,
        "recipe": asked.recipe,
        "skip_masked": asked.skip_masked,
        "backward": backward,
        "batch": batch,
        "heads": heads,
        "kv_heads": terms.kv_heads,
        "length": n_q,
        "kv_length": problem.k.shape[2],
        "head_dim": width,
        "value_dim": problem.v.shape[3],
        "causal": terms.causal,
        "window": None if terms.window is None else list(terms.window),
        "cu_seqlens": asked.options["cu_seqlens"],
        "cu_seqlens_k": asked.options["cu_seqlens_k"],
        "q_offset": asked.options["q_offset"],
        "scale": terms.scale,
        "softcap": terms.softcap,
        "sinks": 0 if terms.sinks is None else terms.sinks.shape[1],
        "dropout_p": terms.dropout_p,
        "dropout_seed": terms.dropout_seed,
    }


def heading(data: dict[str, Any]) -> list[str]:
    """Return two lines of text, one that describes the ring and one that describes the problem."""
    features = ["causal" if data["causal"] else "not causal"]
    if data["window"] is not None:
        left, right = ("unbounded" if side is None else side for side in data["window"])
        features.append(f"window ({left}, {right})")
    for name, words in (("cu_seqlens", "documents"), ("cu_seqlens_k", "documents of keys")):
        if data[name] is not None:
            lengths = np.diff(data[name]).tolist()
            features.append(f"{words} {', '.join(map(str, lengths))}")
    if data["q_offset"]:
        features.append(f"q offset {data['q_offset']}")
    if data["softcap"] is not None:
        features.append(f"softcap {data['softcap']:g}")
    if data["sinks"]:
        features.append(f"sinks {data['sinks']}")
    if data["dropout_p"]:
        features.append(f"dropout {data['dropout_p']:g} (seed {data['dropout_seed']})")
    direction = "" if data["direction"] == 1 else f", direction {data['direction']}"
    return [
        f"ring of {data['workers']} workers, layout {data['layout']}, circulation "
        f"{data['circulation']}{direction}, recipe {data['recipe']}",
        f"B={data['batch']} H={data['heads']} Hkv={data['kv_heads']} Sq={data['length']} "
        f"Sk={data['kv_length']} D={data['head_dim']} Dv={data['value_dim']}, "
        f"{', '.join(features)}",
    ]
