"""What the specification gives for a case, by every road that it has to the same result.

Run as a program, ``python spec_of_case.py RULE FILE`` compares the cases that list a rule with what
FILE holds of them, stops at the first that differs and says which one it was: ``test_catalogue.py``
does that with a package whose rule is broken.
"""

import pickle
import sys
from pathlib import Path

import numpy as np

from ringspec.formats import load, round_to
from ringspec.problem.options import check, default_scale
from ringspec.recipes import recipe
from ringspec.rings import attention, layouts, merging, schedules
from ringspec.rings.ring import ring
from ringspec.spec import online_softmax
from ringspec.spec.block import block_backward
from ringspec.vectors.format.inputs import inputs_of

GRADIENTS = ("dq", "dk", "dv", "dsinks", "dbias")
NOT_OPTIONS = ("q", "k", "v", "dy", "dlse", "lse", "delta")


def results_of(case):
    """Arrays and texts by name; a narrower recipe where a rule of rounding is listed."""
    x = {
        name: load(values) if values.dtype.kind in "fV" else values
        for name, values in inputs_of(case).items()
    }
    if case.operation == "schedule":
        return schedule_results(case)
    if case.operation == "merge":
        return merge_results(case, x)
    options = dict(case.terms) | {n: x[n] for n in x if n not in NOT_OPTIONS}
    if options["scale"] == default_scale(case.shape.D):
        del options["scale"]
    if case.operation == "ring":
        return ring_results(case, x, options)
    if case.operation == "block":
        return block_results(case, x, options)
    return attention_results(case, x, options)


def schedule_results(case):
    circle = case.ring
    forward = schedules.forward_schedule(circle.circulation, circle.workers, circle.direction)
    backward = schedules.backward_schedule(circle.circulation, circle.workers, circle.direction)
    return {"forward": str(forward), "backward": str(backward)}


def merge_results(case, x):
    pairs = list(zip(x["parts_o"], x["parts_lse"], strict=True))
    whole = merging.merge_partials(pairs)
    results = {"o": whole.o, "lse": whole.lse}
    used = recipe("float64").replace(name="stored", merge=case.formats.inputs)
    weights = [np.where(np.isneginf(lse), 0.0, 1.0) for _, lse in pairs]
    states = [
        online_softmax.SoftmaxState(lse, weight, np.where(weight[..., None] > 0, o, 0.0))
        for (o, lse), weight in zip(pairs, weights, strict=True)
    ]
    for how in (online_softmax.merge, online_softmax.merge_normalised):
        state = states[0]
        for part in states[1:]:
            state = how(state, part, used)
        o, lse = online_softmax.finish(state, None, used)
        results |= {f"o by {how.__name__}": o, f"lse by {how.__name__}": lse}
    return results


def attention_results(case, x, options):
    whole = attention.attention(x["q"], x["k"], x["v"], **options)
    results = {"o": whole.o, "lse": whole.lse}
    results["rounded o"] = round_to(whole.o, case.formats.outputs)
    if "backward" in case.passes:
        dlse = x.get("dlse")
        share = attention.attention_backward(x["q"], x["k"], x["v"], x["dy"], dlse=dlse, **options)
        results |= {n: getattr(share, n) for n in GRADIENTS if getattr(share, n) is not None}
        results["rounded dv"] = round_to(share.dv, case.formats.outputs)
    run = ring(x["q"], x["k"], x["v"], x.get("dy"), dlse=x.get("dlse"), workers=1, **options)
    results["scale"] = str(run.problem.terms.scale)
    return results | worker_results(run, "one worker")


def block_results(case, x, options):
    if "backward" not in case.passes:
        return attention_results(case, x, options)
    given = (x["q"], x["k"], x["v"], x["dy"])
    share = attention.attention_block_backward(*given, lse=x["lse"], delta=x["delta"], **options)
    problem = check(x["q"], x["k"], x["v"], options)
    block = block_backward(
        problem.q, problem.k, problem.v, x["dy"], x["lse"], x["delta"],
        problem.tile,
    )  # fmt: skip
    both = (("dense", share), ("block", block))
    return {
        f"{n} {road}": getattr(result, n)
        for road, result in both
        for n in GRADIENTS
        if getattr(result, n, None) is not None
    }


def ring_results(case, x, options):
    circle = case.ring
    used = circle.layout
    if used == "table":
        used = (np.array(circle.table_q), np.array(circle.table_k or circle.table_q))
    settings = {
        "dlse": x.get("dlse"), "workers": circle.workers, "layout": used,
        "circulation": circle.circulation, "direction": circle.direction,
    }  # fmt: skip
    given = (x["q"], x["k"], x["v"], x.get("dy"))
    run = ring(*given, **settings, **options)
    results = worker_results(run, "worker")
    skipped = ring(*given, **settings, skip_masked=True, **options)
    results |= worker_results(skipped, "skipping")
    if any(rule.startswith("NUM") for rule in case.rules):
        partials = "fp16_partials" if case.formats.inputs == "float16" else "bf16_partials"
        results |= worker_results(ring(*given, **settings, recipe=partials, **options), partials)
    if circle.layout in ("contiguous", "striped", "zigzag"):
        results["offsets"] = np.array(offsets(case, options.get("q_offset", 0)))
    if circle.layout == "striped":
        results["unpermuted"] = np.stack(layouts.unpermute([w.o for w in run.workers]))
    if "LAYOUT-7" in case.rules:
        results["tiles"] = layouts.lse_to_tiles(run.lse)
    return results


def offsets(case, q_offset):
    """The causal offset of every pair of blocks (RING-8, RING-9, RING-10)."""
    circle = case.ring
    lengths = {
        "workers": circle.workers, "n_q": case.shape.Sq // circle.workers,
        "n_k": case.shape.Sk // circle.workers, "q_offset": q_offset,
    }  # fmt: skip
    pairs = [(a, b) for a in range(circle.workers) for b in range(circle.workers)]
    if circle.layout == "zigzag":
        return [schedules.zigzag_offsets(a, b, **lengths) for a, b in pairs]
    return [schedules.cp_offset(circle.layout, a, b, **lengths) for a, b in pairs]


def worker_results(run, road):
    """What every worker holds at the end, and what the whole run gives."""
    results = {}
    for name in ("o", "lse", *GRADIENTS):
        parts = [getattr(worker, name) for worker in run.workers]
        if parts[0] is not None:
            results[f"{name} {road}"] = np.stack(parts)
    if run.gradients is not None:
        for name in GRADIENTS:
            total = getattr(run.gradients, name)
            if total is not None:
                results[f"{name} {road}, whole"] = total
    return results


def same(got, want):
    """Equal texts; arrays that agree to 12 digits, NaN never."""
    if isinstance(want, str) or isinstance(got, str):
        return got == want
    return got.shape == want.shape and np.allclose(got, want, rtol=1e-12, atol=1e-300)


def differs(case, want):
    try:
        got = results_of(case)
    except Exception:  # a broken rule may well raise
        return True
    return set(got) != set(want) or not all(same(got[name], want[name]) for name in want)


def main(rule, path):
    from ringspec.vectors.catalogue import catalogue

    np.seterr(all="ignore")
    wanted = pickle.loads(Path(path).read_bytes())  # noqa: S301 - written by the test itself
    listed = [case for case in catalogue("core") if rule in case.rules]
    return next((case.id for case in listed if differs(case, wanted[case.id])), "")


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
