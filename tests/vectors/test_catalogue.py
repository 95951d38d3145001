"""What the catalogue promises: every rule, feature and worker count, inputs that discriminate."""

import os
import pickle
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from refusals import refuses
from rules.mutations import MUTATIONS
from vectors.spec_of_case import results_of

import ringspec.vectors
from ringspec.conformance.cases import layouts
from ringspec.errors import OptionError
from ringspec.formats import load
from ringspec.problem.options import default_scale
from ringspec.spec.rules import RULES
from ringspec.vectors.catalogue import SET_VERSIONS, catalogue
from ringspec.vectors.catalogue.build import ring as ring_case
from ringspec.vectors.catalogue.flags import FLAGS
from ringspec.vectors.format.case_json import case_from_json, case_to_json
from ringspec.vectors.format.flag import STATUSES
from ringspec.vectors.format.inputs import inputs_of
from ringspec.vectors.format.requires import requires

CORE, KERNEL = catalogue("core"), catalogue("kernel")
BOTH = CORE + KERNEL + catalogue("merge") + catalogue("cp")
SHAPED = [case for case in BOTH if case.storage != "full"]


def of(cases, **wanted):
    """The cases whose capabilities have these values, or contain them."""
    return [case for case in cases if all(fits(case, k, v) for k, v in wanted.items())]


def fits(case, key, value):
    had = case.requires.get(key)
    return value in had if isinstance(had, tuple) else had == value


# Form -------------------------------------------------------------------------------------------


def test_the_sets_are_as_large_as_promised_and_no_larger():
    assert len(CORE) >= 150 and len(KERNEL) >= 64
    stored = Counter(case.storage for case in CORE)
    assert stored["sampled"] >= 20 and stored["digests"] == 0
    assert {case.storage for case in KERNEL} == {"digests"}
    assert sum(map(estimated_seconds, KERNEL)) <= 600
    assert set(SET_VERSIONS) == {"core", "kernel", "merge", "cp"}


def estimated_seconds(case):
    """Of one core, forward and backward: 2 s at S = 512, D = 128, one head."""
    shape = case.shape
    pairs = shape.B * shape.H * shape.Sq * shape.Sk
    passes = 1.0 if "backward" in case.passes else 0.5
    return 2.0 * pairs / 512**2 * (0.4 + 0.6 * shape.D / 128) * passes


def test_the_files_of_the_packaged_core_set_are_small():
    folder = Path(ringspec.vectors.__file__).parent / "data" / "core"
    sizes = {
        case.id: sum(file.stat().st_size for file in (folder / case.id).iterdir()) for case in CORE
    }
    assert sum(sizes.values()) <= 5.5 * 2**20
    assert max(sizes.values()) <= 200_000


def test_an_unknown_set_is_refused():
    with refuses((OptionError, "unknown-name"), match="kernel"):
        catalogue("kernels")


def test_ids_and_reasons_are_unique_and_readable():
    for name in ("id", "reason"):
        repeated = [x for x, n in Counter(getattr(c, name) for c in BOTH).items() if n > 1]
        assert not repeated
    for case in BOTH:
        assert re.fullmatch(r"[a-z-]+/[a-z0-9-]+", case.id) and case.inputs.seed == case.id
        assert re.fullmatch(r"[A-Za-z0-9(].{20,118}\.", case.reason), case.reason
        assert len(set(case.rules)) == len(case.rules) and len(set(case.flags)) == len(case.flags)


def test_an_id_says_what_its_ring_is():
    for case in BOTH:
        words = case.id.split("/")[1].split("-")
        if case.operation not in ("ring", "schedule"):
            continue
        layouts = [x for x in ("contiguous", "striped", "zigzag", "table") if x in words]
        if layouts and "table" not in words:
            assert case.ring.layout.startswith(layouts[0]), case.id
        if case.id.startswith("adversarial/"):
            continue
        assert [x for x in words if re.fullmatch(r"w\d", x)][0] == f"w{case.ring.workers}"
        assert ("q" in words) == (case.ring.circulation == "q") or "offset" in words, case.id
        assert ("gather" in words) == (case.ring.circulation == "gather"), case.id
        assert ("reversed" in words) == (case.ring.direction == -1), case.id
        assert layouts or case.ring.layout == "contiguous", case.id
        assert "causal" not in words or case.terms["causal"], case.id


def test_a_case_is_the_same_after_its_text():
    for case in BOTH:
        assert case_from_json(case_to_json(case)) == case


def test_only_what_differs_from_the_default_is_stated():
    for case in BOTH:
        assert case.terms.get("causal", True) is True and case.terms.get("q_offset", 1) != 0
        if case.operation == "merge":
            assert set(case.terms) <= {"empty_lse", "lse_base"}
        elif case.operation == "schedule":
            assert case.terms == {}
        elif not {"scale", "mla"} & set(case.requires["features"]):
            assert case.terms["scale"] == default_scale(case.shape.D)


# Rules and flags --------------------------------------------------------------------------------


def test_every_rule_is_listed_by_a_case_and_no_other():
    known = {rule.id for rule in RULES if not rule.id.startswith("CP-")}
    in_core = {rule for case in CORE for rule in case.rules}
    of_layouts = {rule for case in layouts.cases() for rule in case.rules}
    assert in_core | of_layouts == known
    assert {rule for case in KERNEL for rule in case.rules} <= known
    of_schemes = {rule for case in catalogue("cp") for rule in case.rules}
    every = {rule.id for rule in RULES}
    assert every - known <= of_schemes <= every


def test_every_flag_is_known_and_used_by_the_core_set():
    assert {flag for case in CORE for flag in case.flags} == set(FLAGS)
    assert {flag for case in KERNEL for flag in case.flags} <= set(FLAGS)


def test_flags_name_a_class_an_effect_and_public_reports():
    assert len({flag.effect for flag in FLAGS.values()}) == len(FLAGS)
    for name, flag in FLAGS.items():
        assert flag.name == name and flag.bug_class and flag.effect.endswith(".")
        assert len(flag.reports) == len(flag.statuses) and set(flag.statuses) <= set(STATUSES)
        assert all(
            re.fullmatch(r"https://github\.com/[\w.-]+/[\w./-]+", url) for url in flag.reports
        )
    assert sum(bool(flag.reports) for flag in FLAGS.values()) >= 40


def test_a_flag_that_two_workers_cannot_show_has_more():
    for case in BOTH:
        if {"ring-direction", "buffer-reuse"} & set(case.flags):
            assert case.requires["workers"] >= 3, case.id


# The rules of the specification whose one-line mutation changes a validator or nothing that an
# input can show; these lines break the same rules in what is computed.
INSTEAD = {
    "RING-2": (
        "spec/schedule.py",
        "    return (worker - direction * step) % workers",
        "    return (worker - direction * min(step, 1)) % workers",
    ),
    "RING-3": (
        "spec/schedule.py",
        "    return tuple((r, (r + direction) % workers) for r in range(workers))",
        "    return tuple((r, min(max(r + direction, 0), workers - 1)) for r in range(workers))",
    ),
    "RING-11": (
        "rings/ring.py",
        "        if not block_visible(problem, layout_q, layout_k, a, b)",
        "        if a < b",
    ),
}


# Of the rules that the core set lists: other layouts and schemes have cases of their own.
OF_CORE = [
    (rule, *INSTEAD.get(rule, how))
    for rule, *how in MUTATIONS
    if any(rule in case.rules for case in CORE)
]


def test_the_lines_that_break_a_rule_instead_replace_one_that_is_there():
    for module, line, _ in INSTEAD.values():
        assert line + "\n" in (Path(ringspec.__file__).parent / module).read_text()


@pytest.fixture(scope="module")
def right_results(tmp_path_factory):
    """A file with what the specification gives for every case of the core set."""
    path = tmp_path_factory.mktemp("right") / "results"
    with np.errstate(all="ignore"):
        path.write_bytes(pickle.dumps({case.id: results_of(case) for case in CORE}))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("rule,module,line,broken", OF_CORE, ids=[m[0] for m in OF_CORE])
def test_a_rule_matters_to_a_case_that_lists_it(
    rule, module, line, broken, right_results, tmp_path
):
    package = Path(ringspec.__file__).parent
    shutil.copytree(
        package, tmp_path / "ringspec", ignore=shutil.ignore_patterns("__pycache__", "data")
    )
    path = tmp_path / "ringspec" / module
    text = path.read_text()
    assert line + "\n" in text
    path.write_text(text.replace(line + "\n", broken + "\n"))
    program = Path(__file__).parent / "spec_of_case.py"
    done = subprocess.run(
        [sys.executable, str(program), rule, str(right_results)],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    shown = done.stdout.strip()
    assert shown and rule in next(case for case in CORE if case.id == shown).rules


# Coverage ---------------------------------------------------------------------------------------


def test_every_operation_layout_worker_count_and_circulation_is_there():
    assert {c.operation for c in CORE} == {"attention", "ring", "block", "merge", "schedule"}
    for workers in (1, 2, 3, 4, 8):
        assert len(of(CORE, operation="ring", workers=workers)) >= 2, workers
    for layout in ("contiguous", "striped", "zigzag", "zigzag_per_document", "table"):
        assert len(of(CORE, layout=layout)) >= 3, layout
    for layout in ("contiguous", "striped", "zigzag"):
        for circulation in ("kv", "q", "gather"):
            assert of(BOTH, layout=layout, circulation=circulation), (layout, circulation)
    for circulation in ("kv", "q"):
        for direction in (1, -1):
            found = of(CORE, circulation=circulation, direction=direction)
            assert [c for c in found if c.ring.workers >= 3]
    for passes in (("forward",), ("forward", "backward"), ("backward",)):
        assert [c for c in CORE if c.passes == passes]


@pytest.mark.parametrize("operation", ["attention", "ring"])
def test_every_feature_mask_and_format_is_in_attention_and_in_a_ring(operation):
    masks = "bias-minus-infinity bounds causal dense documents segments window"
    for mask in masks.split():
        assert of(CORE, operation=operation, masks=mask), mask
    features = (
        "bias dlse dropout empty-rows keep positions q-offset scale several-sinks sinks softcap"
    )
    for feature in (features + " unequal-lengths").split():
        assert of(CORE, operation=operation, features=feature), feature
    for name in ("bfloat16", "float16", "float32", "float64"):
        assert of(CORE, operation=operation, inputs=name), name
    assert of(CORE, operation="ring", features="padding-slots")


PADDED = ((0, 1, 2), (3, 4, -1), (5, -1, 6))
UNPADDED = ((0, 1), (2, 3), (4, 5))


@pytest.mark.parametrize(
    "queries, keys, padding",
    [(UNPADDED, UNPADDED, False), (PADDED, UNPADDED, True), (UNPADDED, PADDED, True)],
    ids=["neither", "queries", "keys"],
)
def test_a_padding_slot_of_queries_or_of_keys_is_a_feature(queries, keys, padding):
    lengths = {"Sq": 7 if queries is PADDED else 6, "Sk": 7 if keys is PADDED else 6}
    made = ring_case("ring/a", "a", "LAYOUT-5", W=3, **lengths, table_q=queries, table_k=keys)
    assert ("padding-slots" in made.requires["features"]) is padding


def test_documents_of_the_keys_alone_may_need_padding_slots():
    """Documents of 4 and 4 queries fill the chunks of two workers; of 3 and 5 keys they do not."""
    lengths = {"cu_seqlens": (0, 4, 8), "cu_seqlens_k": (0, 3, 8)}
    ring = {"W": 2, "layout": "zigzag_per_document", "S": 8}
    made = ring_case("ring/a", "a", "LAYOUT-4", **ring, **lengths)
    assert "padding-slots" in made.requires["features"]
    even = ring_case("ring/a", "a", "LAYOUT-4", **ring, cu_seqlens=(0, 4, 8))
    assert "padding-slots" not in even.requires["features"]


def test_windows_dropout_and_bias_come_in_every_form():
    windows = {case.terms.get("window") for case in CORE}
    assert (0, 0) in windows
    assert [w for w in windows if w and w[0] is None] and [w for w in windows if w and w[1] is None]
    assert {0.1, 0.25, 0.5} <= {case.terms.get("dropout_p") for case in CORE}
    shapes = set()
    for case in CORE:
        if "bias" in case.inputs.tensors:
            full = (case.shape.B, case.shape.H, case.shape.Sq, case.shape.Sk)
            given = inputs_of(case)["bias"].shape
            shapes.add(tuple(n == m and m > 1 for n, m in zip(given, full, strict=True)))
    assert {(False, True, True, True), (False, True, False, True), (False, False, False, True),
            (True, False, True, False), (False, True, True, False), (True, False, False, True),
            (False, False, True, True)} <= shapes  # fmt: skip


def test_head_counts_lengths_and_widths_differ_somewhere():
    shapes = [case.shape for case in CORE if case.shape is not None]
    assert {1, 2, 3, 4} <= {case.requires.get("head_ratio") for case in CORE}
    assert [s for s in shapes if 1 < s.Hkv < s.H] and [s for s in shapes if s.H == s.Sq > 1]
    assert [s for s in shapes if s.Sq > s.Sk] and [s for s in shapes if s.Sq < s.Sk]
    assert [s for s in shapes if s.D > s.Dv] and [s for s in shapes if s.D < s.Dv]
    assert [s for s in shapes if s.B > 1]


def test_kernel_shapes_are_those_that_kernels_with_tiles_take():
    for case in SHAPED:
        tokens = case.requires["tokens_per_worker"]
        assert set(tokens) <= ({128, 256} if case in CORE else {128, 256, 384, 640, 1024}), case.id
        assert case.shape.D in (64, 128) and case.ring.workers in (1, 2, 3, 4, 8)
        assert case.shape.Sq <= 1024 and "padding-slots" not in case.requires["features"]
    for cases, workers in (
        (of(CORE, operation="ring", heads=1), {1, 2, 3, 4}),
        (KERNEL, {1, 2, 3, 4, 8}),
    ):
        assert {case.ring.workers for case in cases if case in SHAPED} == workers
    for name in ("bfloat16", "float32", "float16"):
        assert of(KERNEL, inputs=name) and [c for c in of(CORE, inputs=name) if c in SHAPED]


# Inputs -----------------------------------------------------------------------------------------

# Cases whose point is that heads, shards or tokens are alike, or that all is -inf or constant.
ALIKE = re.compile(r"adversarial/(equal|constant|queries-of-zero|alternating|near-ties)|number/")


@pytest.mark.parametrize("name", ["core", "kernel"])
def test_no_two_heads_or_shards_have_the_same_inputs(name):
    for case in catalogue(name):
        x = inputs_of(case)
        if ALIKE.match(case.id) or case.operation in ("merge", "schedule"):
            continue
        for tensor in ("q", "k", "v"):
            values = load(x[tensor])
            for head in range(1, values.shape[1]):
                assert not np.array_equal(values[:, 0], values[:, head]), (case.id, tensor)
        for tensor in ("k", "v"):
            shards = 1 if case.ring is None else case.ring.workers
            parts = np.array_split(load(x[tensor]), shards, axis=2)
            for a in range(shards):
                for b in range(a):
                    same = parts[a].shape == parts[b].shape and np.array_equal(parts[a], parts[b])
                    assert not same, (case.id, tensor, a, b)


def test_means_of_k_and_v_tell_shards_and_heads_apart():
    case = next(c for c in KERNEL if c.id == "kernel/contiguous-w2")
    for name in ("k", "v"):
        values = load(inputs_of(case)[name])
        means = values.reshape(2, 2, -1).mean(axis=2)
        assert (np.diff(means, axis=1) > 0.03).all() and (np.diff(means, axis=0) > 0.03).all()


def test_values_and_gradients_have_both_signs_and_a_mean():
    for case in BOTH:
        if ALIKE.match(case.id) or case.operation in ("merge", "schedule"):
            continue
        if case.operation == "context_parallel" and case.inputs.tensors["v"].kind == "constant":
            continue  # 1 in the component of each key
        x = inputs_of(case)
        values = load(x["v"])
        assert values.min() < 0 < values.max(), case.id
        if "dy" in x and "backward" in case.passes and "dlse-alone" not in case.id:
            dy = load(x["dy"])
            assert dy.min() < 0 < dy.max() and abs(dy.mean()) > 1e-3, case.id


@pytest.mark.parametrize("case", KERNEL + tuple(c for c in CORE if c in SHAPED), ids=lambda c: c.id)
def test_scores_at_kernel_shapes_have_a_usual_spread(case):
    x = {name: load(values) for name, values in inputs_of(case).items() if name in "qk"}
    group = case.shape.H // case.shape.Hkv
    k = np.repeat(x["k"], group, axis=1)
    scores = case.terms["scale"] * (x["q"] @ k.swapaxes(2, 3))
    largest = 20.0 if "scale" in case.requires["features"] else 2.5
    assert 0.8 <= scores.std(axis=3).mean() <= largest


def test_requires_follows_from_the_case():
    for case in BOTH:
        assert requires(case) == case.requires
        assert list(case.requires)[:2] == ["operation", "passes"]


def test_the_specification_takes_every_case_of_the_core_set():
    with np.errstate(all="ignore"):
        for case in CORE:
            results = results_of(case)
            numbers = [x for x in results.values() if not isinstance(x, str)]
            assert not any(np.isnan(x).any() for x in numbers), case.id
            empty = any(np.isneginf(x).any() for name, x in results.items() if name[:3] == "lse")
            forward = "features" in case.requires and "forward" in case.passes
            if forward and "sinks" not in case.requires["features"]:
                slots = {"empty-rows", "padding-slots"} & set(case.requires["features"])
                assert empty == bool(slots), case.id
