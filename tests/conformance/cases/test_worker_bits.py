"""Targets that promise bits which do not depend on the number of workers: two programs in NumPy keep it, two break it."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import ringspec as rs
from ringspec.cli.commands import check_run
from ringspec.conformance.adapters.numpy_lists import NumPyTarget
from ringspec.conformance.cases import profiles, scheme_bits, worker_bits
from ringspec.conformance.cases.model import IF_CLAIMED
from ringspec.conformance.cases.problems import dealt, drawn
from ringspec.conformance.run.suite import run
from ringspec.conformance.target.capabilities import (
    SCHEME_OPERATIONS,
    Capabilities,
    capabilities_from,
)
from ringspec.errors import OptionError

CLAIMS = {
    "layouts": ("contiguous", "striped", "zigzag"),
    "masks": ("causal", "documents"),
    "features": ("scale",),
    "head_ratios": (1,),
    "formats": ("float32",),
}


def sees(call, tokens):
    """[S, S]: the mask of a call, by token."""
    i, j = np.mgrid[:tokens, :tokens]
    seen = j <= i if call.terms.get("causal") else np.ones((tokens, tokens), bool)
    starts = call.terms.get("cu_seqlens", (0, tokens))
    document = np.searchsorted(starts, np.arange(tokens), "right")
    return seen & (document[:, None] == document)


def whole(call):
    """q, k, v, dy in the order of tokens."""
    tokens = sum(len(index) for index in call.index_q)
    found = {}
    for name, own in call.tensors.items():
        x = found[name] = np.empty((*own[0].shape[:2], tokens, own[0].shape[3]), np.float32)
        for index, part in zip(call.index_q, own, strict=True):
            x[:, :, index] = part
    return found


def row(q, k, v, scale, exp):
    """One query over some keys: sums of one shape, so that the same keys give the same bits."""
    s = (q * k).sum(-1) * np.float32(scale)
    e = exp(s - s.max())
    return (e[:, None] * v).sum(0) / e.sum(), s.max() + np.log(e.sum())


def program(call, blocks_of, exp=np.exp):
    """A row for each query, over the blocks of keys that ``blocks_of`` gives; parts are merged by their lse."""
    x = whole(call)
    tokens, scale = x["q"].shape[2], call.terms["scale"]
    seen, blocks = sees(call, tokens), blocks_of(call, tokens)
    out = {name: np.zeros_like(x["q"]) for name in ("o", "dq", "dk", "dv")}
    out["lse"] = np.zeros(x["q"].shape[:3], np.float32)
    for b, h in np.ndindex(x["q"].shape[:2]):
        q, k, v = (x[name][b, h] for name in ("q", "k", "v"))
        for i in range(tokens):
            mine = [block[seen[i, block]] for block in blocks]
            parts = [row(q[i], k[j], v[j], scale, exp) for j in mine if j.size]
            o, lse = parts[0]
            for o_new, lse_new in parts[1:]:
                total = np.logaddexp(lse, lse_new)
                o = np.exp(lse - total) * o + np.exp(lse_new - total) * o_new
                lse = total
            out["o"][b, h, i], out["lse"][b, h, i] = o, lse
            if "dy" not in x:
                continue
            dy = x["dy"][b, h, i]
            for j in mine:
                if j.size:
                    p = np.exp((q[i] * k[j]).sum(-1) * np.float32(scale) - lse)
                    ds = p * ((v[j] * dy).sum(-1) - (o * dy).sum()) * np.float32(scale)
                    out["dq"][b, h, i] += (ds[:, None] * k[j]).sum(0)
                    out["dk"][b, h, j] += ds[:, None] * q[i]
                    out["dv"][b, h, j] += p[:, None] * dy
    kept = out if "dy" in x else {name: out[name] for name in ("o", "lse")}
    return {name: [part[:, :, index] for index in call.index_q] for name, part in kept.items()}


def all_keys(call, tokens):
    return [np.arange(tokens)]


def of_workers(call, tokens):
    return list(call.index_k)


def other_exp_alone(call):
    """A ring that takes another path with one worker: exp as a power of 2."""
    power = lambda s: np.exp2(s * np.float32(np.log2(np.e)))  # noqa: E731
    return program(call, of_workers, power if call.workers == 1 else np.exp)


PROGRAMS = {
    "ulysses": lambda call: program(call, all_keys),
    "ring": lambda call: program(call, of_workers),
    "other exp": other_exp_alone,
}


def records_of(name, promise, keep=lambda case: True):
    claims = Capabilities(**CLAIMS, invariant_under_workers=promise)
    cases = [case for case in worker_bits.cases() if case.why_not(claims) is None]
    target = NumPyTarget(PROGRAMS[name], claims, name)
    return list(run(target, [case for case in cases if keep(case)]).records)


@pytest.mark.parametrize(("name", "promise"), [("ulysses", "all"), ("ring", "unmerged-rows")])
def test_a_program_that_keeps_its_promise_passes(name, promise):
    records = records_of(name, promise)
    assert len(records) == (5 if promise == "all" else 4)
    assert [(r.id, r.outcome, r.message) for r in records if r.outcome != "pass"] == []


def test_a_ring_does_not_have_the_same_bits_for_every_number_of_workers():
    records = records_of("ring", "all")
    wrong = {r.id.rpartition("/")[2] for r in records if r.outcome == "mismatch"}
    # Documents that are shards are merged nowhere.
    assert wrong == {f"{one}-f32" for one in ("full-contiguous", "causal-contiguous", "causal-striped", "causal-zigzag")}  # fmt: skip
    first = next(r for r in records if r.id.endswith("causal-contiguous-f32"))
    assert first.message.startswith("o with 2 workers has other bits than with 1, in ")
    assert "(worker 1); the target claims invariant_under_workers='all'." in first.message
    assert all(finding.kind == "ok" for r in records for finding in r.findings)


def test_another_path_with_one_worker_breaks_the_promise_of_rows_that_are_not_merged():
    records = records_of("other exp", "unmerged-rows", lambda case: "striped" not in case.id)
    assert records and all(r.outcome == "mismatch" for r in records)
    assert all("merges no partial results for them" in r.message for r in records)


def test_a_target_that_promises_nothing_gets_no_case_and_claims_as_before(monkeypatch):
    promises = profiles.run_cases("worker-bits")
    monkeypatch.setattr(
        profiles, "run_cases", lambda name: promises if name == "worker-bits" else []
    )
    plain = Capabilities(**CLAIMS)
    promised = Capabilities(**CLAIMS, invariant_under_workers="all")
    assert all(profiles.cases_for(name, plain) == [] for name in ("smoke", "core", "full", "seeds"))
    assert all(case.why_not(plain) is not None for case in promises)
    assert "invariant_under_workers" not in plain.as_dict()
    for name in ("smoke", "core", "full", "seeds"):
        assert profiles.cases_for(name, promised) == (promises if name in ("core", "full") else [])
    assert capabilities_from(promised.as_dict()) == promised
    with pytest.raises(OptionError, match="unmerged-rows"):
        Capabilities(invariant_under_workers="some")


def test_a_promise_of_unmerged_rows_includes_no_case_whose_every_row_is_merged():
    rows = Capabilities(**CLAIMS, invariant_under_workers="unmerged-rows")
    refused = [case.id for case in worker_bits.cases() if case.why_not(rows) is not None]
    assert "property/worker-bits/full-contiguous-f32" in refused
    assert "property/worker-bits/causal-contiguous-f32" not in refused


def test_a_case_of_a_promise_is_found_by_its_id():
    """Where ``ringspec replay`` looks, and the processes of ``ringspec check --jobs``."""
    id = "property/worker-bits/causal-zigzag-f32"
    assert check_run.found(id).id == id
    assert id in [case.id for name in IF_CLAIMED for case in profiles.run_cases(name)]


def test_one_claimed_number_of_workers_is_not_enough():
    claims = Capabilities(**CLAIMS, workers=(4,), invariant_under_workers="all")
    reason = worker_bits.cases()[5].why_not(claims)
    assert reason is not None and reason.startswith("fewer than 2 of its rings are claimed")


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"causal": True, "window": (3, 0)}])
@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
def test_rows_that_may_change_are_those_that_a_ring_of_known_merges_changes(mask, layout):
    """No other row changes when float32 parts are replayed; of o, every row of the set does, so it is not too large."""
    case = dealt(drawn("bits", "f32", S=24, **mask), "bits-w4", 4, layout)
    q, k, v, dy = np.random.default_rng(1).normal(0, 1, (4, 1, 2, 24, 64))
    one, four = (
        rs.replay_as(q, k, v, dy, recipe="torch_cp", workers=w, layout=layout, format="float32", **mask)
        for w in (1, 4)
    )  # fmt: skip
    for name, found in one.changes(four).items():
        rows = found.changed.any(axis=(0, 1, 3) if found.changed.ndim == 4 else (0, 1))
        may = ~worker_bits.unmerged(case, name)
        assert not (rows & ~may).any(), name
        assert name != "o" or (rows == may).all()


def scheme_program(call, blocks_of):
    """The program over all heads, whose results each rank takes its own part of."""
    tokens, heads = call.index_q.max() + 1, call.heads_q.max() + 1
    tensors = {}
    for name, own in call.tensors.items():
        x = tensors[name] = np.empty((1, heads, tokens, own[0].shape[3]), np.float32)
        for index, of, part in zip(call.index_q, call.heads_q, own, strict=True):
            x[:, of[:, None], index] = part
    one = SimpleNamespace(
        index_q=[np.arange(tokens)],
        index_k=call.index_k,
        terms=call.terms,
        tensors={name: [x] for name, x in tensors.items()},
    )
    results = program(one, blocks_of)
    return {
        name: [
            x[:, of[:, None], index] for of, index in zip(call.heads_q, call.index_q, strict=True)
        ]
        for name, [x] in results.items()
    }


@pytest.mark.parametrize(("blocks_of", "outcome"), [(all_keys, "pass"), (of_workers, "mismatch")])
def test_ulysses_with_whole_heads_keeps_its_bits_and_with_keys_that_are_cut_does_not(
    blocks_of, outcome
):
    claims = Capabilities(
        **CLAIMS | {"operations": SCHEME_OPERATIONS, "schemes": ("ulysses",)},
        invariant_under_workers="all",
    )
    cases = [case for case in scheme_bits.cases() if "zigzag" not in case.id]
    target = NumPyTarget(lambda call: scheme_program(call, blocks_of), claims, "ulysses")
    records = list(run(target, cases).records)
    assert [r.outcome for r in records] == [outcome] * 2, [r.message for r in records]
    assert all(f.kind == "ok" for r in records for f in r.findings)
    if outcome != "pass":
        assert "o with 2 ranks has other bits than with 1" in records[0].message
    none = replace(claims, schemes=())
    assert all(case.why_not(none) is not None for case in scheme_bits.cases())
