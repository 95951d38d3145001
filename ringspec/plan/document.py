"""A plan as plain data with stable keys: what ``ringspec plan --json`` prints."""

from __future__ import annotations

from typing import Any

from ringspec.plan.advice import advice, scheme_advice, warning
from ringspec.plan.hardware import Hardware, Link, Rate
from ringspec.plan.options import Option, Plan
from ringspec.plan.scheme_options import LIMITS, USES, SchemeOption, SchemePass
from ringspec.plan.times import Pass

MOST_STEPS = 16


def plan_document(planned: Plan) -> dict[str, Any]:
    """Return ``planned`` as plain data: the workload, the hardware with its sources, all options and the advice."""
    return {
        "workload": workload_document(planned),
        "hardware": hardware_document(planned.hardware),
        "link": planned.link.name,
        "options": [option_document(one) for one in planned.options],
        "best": {"layout": planned.best.layout, "circulation": planned.best.circulation},
        "advice": [*warning(planned), *advice(planned)],
        "schemes": {
            "possible": [scheme_document(one) for one in planned.schemes],
            "impossible": [
                {"scheme": x.scheme, "why": x.why, "fix": x.fix} for x in planned.impossible
            ],
            "advice": scheme_advice(planned),
        },
    }


def scheme_document(one: SchemeOption) -> dict[str, Any]:
    """Return a scheme on a mesh as plain data."""
    return {
        "scheme": one.scheme,
        "mesh": [list(axis) for axis in one.mesh.axes],
        "layout": one.layout,
        "held_bytes": one.held,
        "fits": one.fits,
        "seconds": None if one.times is None else one.times.total,
        "limits": LIMITS[one.scheme],
        "use": USES[one.scheme],
        "passes": [scheme_pass_document(way) for way in one.passes],
    }


def scheme_pass_document(way: SchemePass) -> dict[str, Any]:
    """Return one pass of a scheme as plain data."""
    names = ("compute", "waiting", "exposed")
    seconds = {f"{x}_seconds": None if way.times is None else getattr(way.times, x) for x in names}
    return {
        "name": way.name,
        "bytes_sent": way.bytes_sent,
        "bytes_sent_along": way.sent,
        "held_bytes": way.held,
        "operations": list(way.operations),
        "transfers": way.transfers,
        "messages": way.messages,
        "steps": way.steps,
    } | seconds


def workload_document(planned: Plan) -> dict[str, Any]:
    work = planned.work
    names = (
        "length",
        "workers",
        "tokens",
        "batch",
        "heads",
        "kv_heads",
        "head_dim",
        "value_dim",
        "causal",
    )
    return {name: getattr(work, name) for name in names} | {
        "window": None if work.window is None else list(work.window),
        "recipe": work.recipe.name,
        "backward": planned.best.backward is not None,
        "overlap": planned.overlap,
        "flops_per_pair": {"forward": work.flops(False), "backward": work.flops(True)},
    }


def rate_document(rate: Rate) -> dict[str, Any]:
    return {"value": rate.value, "says": rate.says, "source": rate.source}


def link_document(link: Link) -> dict[str, Any]:
    return {
        "name": link.name,
        "workers": link.workers,
        "bytes_per_second": rate_document(link.bytes_per_second),
        "latency": rate_document(link.latency),
    }


def hardware_document(device: Hardware) -> dict[str, Any]:
    return {
        "name": device.name,
        "flops_per_second": {f: rate_document(r) for f, r in device.flops_per_second.items()},
        "forward_efficiency": rate_document(device.forward_efficiency),
        "backward_efficiency": rate_document(device.backward_efficiency),
        "memory": rate_document(device.memory),
        "memory_bytes_per_second": rate_document(device.memory_bytes_per_second),
        "links": [link_document(link) for link in device.links],
    }


def option_document(one: Option) -> dict[str, Any]:
    return {
        "layout": one.layout,
        "circulation": one.circulation,
        "seconds": one.seconds,
        "idle": one.idle,
        "memory_bytes": one.memory,
        "fits": one.fits,
        "hides_from_tokens": one.hides_from,
        "hides_to_workers": one.hides_to,
        "passes": [pass_document(way) for way in one.passes],
    }


def pass_document(way: Pass) -> dict[str, Any]:
    names = (
        "name", "pairs", "bytes_sent", "hops", "working_steps", "imbalance", "lockstep_imbalance",
        "seconds", "timeline_seconds", "compute_seconds", "waiting_seconds", "exposed_seconds",
        "transfer_seconds", "idle", "streaming_bound",
    )  # fmt: skip
    held = way.memory
    return {name: getattr(way, name) for name in names} | {
        "hides_from_tokens": way.hides_from,
        "memory_bytes": {
            "inputs": held.inputs,
            "accumulators": held.accumulators,
            "buffers": held.buffers,
            "gathered": held.gathered,
        },
        "steps": step_documents(way),
    }


def step_documents(way: Pass) -> list[dict[str, Any]]:
    """Return the steps of a pass as plain data; of more than 16 steps, 16 evenly spaced ones, with the first and last.

    Pairs are counted for one head.
    """
    counted = way.counted
    count = counted.steps.most.size
    shown = range(count)
    if count > MOST_STEPS:
        last = MOST_STEPS - 1
        shown = [number * (count - 1) // last for number in range(MOST_STEPS)]  # type: ignore[assignment]
    return [
        {
            "step": t,
            "most_pairs": int(counted.steps.most[t]),
            "least_pairs": int(counted.steps.least[t]),
            "all_pairs": int(counted.steps.total[t]),
            "input_bytes": int(counted.traffic.inputs[t]),
            "accumulator_bytes": int(counted.traffic.accumulators[t]),
            "compute_seconds": float(way.step_compute[t]),
            "transfer_seconds": float(way.step_transfer[t]),
        }
        for t in shown
    ]
