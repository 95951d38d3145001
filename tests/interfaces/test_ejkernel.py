"""ejkernel's interface against the dense definition of the gathered problem.

Global tensors are [B, S, H, D] here; rank r of a ring holds tokens r*n .. r*n + n - 1.
"""

import inspect

import numpy as np
import pytest
from interfaces.given import dense_given
from oracle.row_scale import row_scale, worst_row_error
from refusals import refuses

import ringspec as rs
from ringspec.errors import DtypeError, NonFiniteError, OptionError, RefusedError, ShapeError
from ringspec.formats import FORMATS, load, store
from ringspec.interfaces import ejkernel
from ringspec.interfaces.ejkernel import RingFlashResiduals

BOUND = 1e-14
NAMES = ("dq", "dk", "dv")


def heads_first(x):
    return np.swapaxes(x, -3, -2)


class Case:
    """q, dy [B, Sq, H, D] and k, v [B, Sk, Hkv, D], and their shards [W, B, n, heads, D]."""

    def __init__(self, workers, n=3, n_k=None, batch=2, heads=4, kv_heads=2, width=5, seed=0):
        random = np.random.default_rng(seed)
        self.random, self.workers = random, workers
        n_k = n if n_k is None else n_k
        self.shape = (batch, heads, workers * n, workers * n_k)
        self.q, self.dy = (
            random.standard_normal((batch, workers * n, heads, width)) for _ in range(2)
        )
        self.k, self.v = (
            random.standard_normal((batch, workers * n_k, kv_heads, width)) for _ in range(2)
        )

    def rounded(self, name):
        for tensor in ("q", "k", "v", "dy"):
            setattr(self, tensor, load(store(getattr(self, tensor), name)))
        return self

    def shards(self, x, axis=1):
        return np.stack(np.split(x, self.workers, axis))

    def inputs(self, name="float64"):
        return [store(self.shards(x), name) for x in (self.q, self.k, self.v)]

    @property
    def natural(self):
        """q, k, v as the definition takes them."""
        return [heads_first(x) for x in (self.q, self.k, self.v)]

    def truth(self, **options):
        """Forward, gradients and row scales of the global problem."""
        dy = heads_first(self.dy)
        return (
            rs.attention(*self.natural, **options),
            rs.attention_backward(*self.natural, dy, **options),
            row_scale(*self.natural, dy, **options),
        )


def arguments(**given):
    """The non-tensor arguments of the ring call in their order, defaults for the rest."""
    values = {
        "softmax_scale": None,
        "dropout_prob": 0.0,
        "causal": False,
        "dropout_seed": None,
        "fwd_params": None,
        "bwd_params": None,
        "sliding_window": None,
        "logits_soft_cap": None,
        "axis_name": "ring",
    }
    assert set(given) <= set(values)
    return tuple((values | given).values())


def test_signatures_are_those_of_ejkernel():
    def described(function):
        parameters = inspect.signature(function).parameters.values()
        return [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    ring_names = (
        "query key value attention_mask bias softmax_scale dropout_prob causal dropout_seed "
        "fwd_params bwd_params sliding_window logits_soft_cap axis_name"
    ).split()
    for function in (ejkernel.ring_flash_attention_call, ejkernel._ring_flash_attention_fwd):
        assert [p.name for p in described(function)] == ring_names
        assert all(p.default is p.empty for p in described(function))
    backward = described(ejkernel._ring_flash_attention_bwd)
    assert [p.name for p in backward] == [*ring_names[5:], "res", "do"]
    assert RingFlashResiduals._fields == (
        "q",
        "k",
        "v",
        "bias",
        "attention_mask",
        "o",
        "lse",
        "dropout_seed",
    )
    flash = described(ejkernel.flash_attention_bwd)
    assert [p.name for p in flash] == (
        "dO q k v bias attention_mask o M dropout_prob causal softmax_scale dropout_seed "
        "fwd_params bwd_params cum_seqlens_q cum_seqlens_k sliding_window logits_soft_cap "
        "softmax_aux q_segment_ids kv_segment_ids"
    ).split()
    assert [p.default for p in flash] == [inspect.Parameter.empty] * 12 + [None] * 9
    assert ejkernel._bwd_attention_kernel_call is ejkernel.flash_attention_bwd


# --- ring

FEATURES = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"sliding_window": 2}, {"window": (2, 2)}),
    "causal window": ({"sliding_window": 2, "causal": True}, {"window": (2, 0), "causal": True}),
    "window pair": ({"sliding_window": (3, 1)}, {"window": (3, 1)}),
    "window to the right": ({"sliding_window": (0, 2)}, {"window": (0, 2)}),
    "no window": ({"sliding_window": 0}, {}),
    "no window pair": ({"sliding_window": (0, 0), "causal": True}, {"causal": True}),
    "soft cap": ({"logits_soft_cap": 1.5}, {"softcap": 1.5}),
    "scale": ({"softmax_scale": 0.9, "causal": True}, {"scale": 0.9, "causal": True}),
    "dropout": (
        {"dropout_prob": 0.3, "dropout_seed": 7, "causal": True},
        {"dropout_p": 0.3, "dropout_seed": 7, "causal": True},
    ),
    "dropout without a seed": ({"dropout_prob": 0.5}, {"dropout_p": 0.5, "dropout_seed": 0}),
}


def run_ring(case, given, bias=None, mask=None):
    """o, lse, dq, dk, dv of the ring in float64, with o and lse of the definition's accuracy.

    The residuals' float32 lse is replaced by the exact one, so that the gradients can be compared
    to float64 accuracy; that the given one is used has a test of its own.
    """
    o, residuals = ejkernel._ring_flash_attention_fwd(
        *case.inputs(), mask, bias, *arguments(**given)
    )
    return o, residuals


def check_ring(case, given, options, bias=None, mask=None):
    want, truth, scale = case.truth(**options)
    o, residuals = run_ring(case, given, bias, mask)
    assert worst_row_error(heads_first(o), case.shards(want.o, 2), case.shards(scale.o, 2)) <= BOUND
    lse = case.shards(want.lse, 2)
    assert residuals.lse.dtype == np.float32 and residuals.lse.shape == lse.shape
    assert np.array_equal(np.isneginf(residuals.lse), np.isneginf(lse))
    seen = np.isfinite(lse)
    assert np.abs(residuals.lse[seen] - lse[seen]).max(initial=0.0) <= 1e-6
    alone = ejkernel.ring_flash_attention_call(*case.inputs(), mask, bias, *arguments(**given))
    assert np.array_equal(alone, o)
    got = ejkernel._ring_flash_attention_bwd(
        *arguments(**given), residuals._replace(lse=lse), case.shards(case.dy)
    )
    assert got[3] is None and got[4] is None
    for name, gradient in zip(NAMES, got[:3], strict=True):
        expected, unit = (case.shards(getattr(x, name), 2) for x in (truth, scale))
        assert worst_row_error(heads_first(gradient), expected, unit) <= BOUND, name


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("feature", FEATURES)
def test_ring_is_dense_attention_of_the_gathered_problem_at_global_positions(workers, feature):
    given, options = FEATURES[feature]
    check_ring(Case(workers, seed=workers), given, options)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("broadcast", [(2, 4), (1, 4), (2, 1), (1, 1)])
def test_bias_has_local_rows_and_global_keys(workers, broadcast):
    case = Case(workers, seed=1)
    bias = case.random.standard_normal((*broadcast, *case.shape[2:]))
    bias[case.random.random(bias.shape) < 0.3] = -np.inf
    given, options = {"logits_soft_cap": 2.0}, {"softcap": 2.0, "bias": bias}
    check_ring(case, given, options, bias=case.shards(bias, 2))


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("broadcast", [(2, 4), (1, 4), (2, 1), (1, 1)])
def test_attention_mask_has_local_rows_and_global_keys(workers, broadcast):
    case = Case(workers, seed=2)
    mask = case.random.random((*broadcast, *case.shape[2:])) < 0.4
    mask[..., 1, :] = False  # a row without keys
    check_ring(case, {"causal": True}, {"causal": True, "mask": mask}, mask=case.shards(mask, 2))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_as_many_heads_as_tokens_on_a_rank_are_not_confused_with_them(kv_heads):
    case = Case(3, n=4, heads=4, kv_heads=kv_heads, width=4, seed=3)
    check_ring(case, {"causal": True}, {"causal": True})


@pytest.mark.parametrize(("n", "n_k"), [(2, 4), (4, 2)])
def test_ends_are_aligned_when_query_and_key_lengths_differ(n, n_k):
    case = Case(3, n=n, n_k=n_k, seed=4)
    offset = 3 * (n_k - n)
    for given, options in (
        ({"causal": True}, {"causal": True}),
        ({"sliding_window": (4, 1)}, {"window": (4, 1)}),
        ({"dropout_prob": 0.4, "dropout_seed": 3}, {"dropout_p": 0.4, "dropout_seed": 3}),
    ):
        check_ring(case, given, options | {"q_offset": offset})


def test_without_axis_name_every_rank_is_alone_with_positions_from_zero():
    case = Case(3, seed=5)
    given = {"causal": True, "dropout_prob": 0.2, "dropout_seed": 5, "axis_name": None}
    options = {"causal": True, "dropout_p": 0.2, "dropout_seed": 5}
    bias = case.random.standard_normal((3, 1, 4, 3, 3))
    o, residuals = run_ring(case, given, bias=bias)
    dy = case.shards(case.dy)
    got = ejkernel._ring_flash_attention_bwd(*arguments(**given), residuals, dy)
    for r in range(3):
        q, k, v = (heads_first(x[r]) for x in case.inputs())
        want = rs.attention(q, k, v, bias=bias[r], **options)
        assert np.abs(heads_first(o[r]) - want.o).max() <= 1e-13
        assert np.abs(residuals.lse[r] - want.lse).max() <= 1e-6
        truth = rs.attention_backward(q, k, v, heads_first(dy[r]), bias=bias[r], **options)
        for name, gradient in zip(NAMES, got[:3], strict=True):
            assert np.abs(heads_first(gradient[r]) - getattr(truth, name)).max() <= 1e-5


def test_block_sizes_have_no_effect():
    case = Case(2)
    plain = ejkernel.ring_flash_attention_call(*case.inputs(), None, None, *arguments())
    given = {"fwd_params": {"q_blocksize": 64}, "bwd_params": object()}
    sized = ejkernel.ring_flash_attention_call(*case.inputs(), None, None, *arguments(**given))
    assert np.array_equal(plain, sized)


def test_residuals_hold_the_arguments_as_they_were_given():
    case = Case(2)
    q, k, v = case.inputs("float32")
    bias = np.zeros((2, 1, 1, 3, 6), np.float32)
    o, residuals = ejkernel._ring_flash_attention_fwd(
        q, k, v, None, bias, *arguments(dropout_seed=4)
    )
    assert isinstance(residuals, RingFlashResiduals)
    assert residuals.q is q and residuals.k is k and residuals.v is v and residuals.bias is bias
    assert residuals.attention_mask is None and residuals.dropout_seed == 4
    assert residuals.o is o


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_results_are_the_float64_ones_rounded_once_to_the_input_dtype(name):
    case = Case(3, seed=6).rounded(name)
    o, residuals = ejkernel._ring_flash_attention_fwd(
        *case.inputs(name), None, None, *arguments(causal=True)
    )
    want = rs.attention(*case.natural, causal=True)
    assert o.dtype == FORMATS[name].dtype and residuals.lse.dtype == np.float32
    assert np.array_equal(heads_first(o), store(case.shards(want.o, 2), name))
    assert np.array_equal(residuals.lse, store(case.shards(want.lse, 2), "float32"))

    dy = store(case.shards(case.dy), name)
    got = ejkernel._ring_flash_attention_bwd(*arguments(causal=True), residuals, dy)
    exact = ejkernel._ring_flash_attention_bwd(
        *arguments(causal=True),
        residuals._replace(q=load(residuals.q), k=load(residuals.k), v=load(residuals.v)),
        dy,
    )
    for gradient, float64_gradient in zip(got[:3], exact[:3], strict=True):
        assert gradient.dtype == FORMATS[name].dtype and float64_gradient.dtype == np.float64
        assert np.array_equal(gradient, store(float64_gradient, name))


def test_each_gradient_has_the_dtype_of_its_own_input():
    case = Case(2)
    q, k, v = case.inputs()
    mixed = [q.astype(np.float32), store(k, "bfloat16"), v.astype(np.float16)]
    _, residuals = ejkernel._ring_flash_attention_fwd(*mixed, None, None, *arguments())
    got = ejkernel._ring_flash_attention_bwd(*arguments(), residuals, case.shards(case.dy))
    assert [x.dtype for x in got[:3]] == [x.dtype for x in mixed]


@pytest.mark.rule("BWD-11")
def test_ring_backward_uses_the_residuals_o_and_lse_as_given():
    case = Case(3, heads=2, kv_heads=2, seed=7)
    q, k, v = case.natural
    want, _, scale = case.truth(causal=True)
    o = want.o + 0.1 * case.random.standard_normal(want.o.shape)
    lse = want.lse + 0.1 * case.random.standard_normal(want.lse.shape)
    residuals = RingFlashResiduals(
        *case.inputs(), None, None, case.shards(heads_first(o)), case.shards(lse, 2), None
    )
    got = ejkernel._ring_flash_attention_bwd(
        *arguments(causal=True), residuals, case.shards(case.dy)
    )
    expected = dense_given(
        q, k, v, heads_first(case.dy), o, lse, scale=5**-0.5, allowed=np.tri(9, dtype=bool)
    )
    for name, gradient, expect in zip(NAMES, got[:3], expected, strict=True):
        unit = 4 * case.shards(getattr(scale, name), 2)
        assert worst_row_error(heads_first(gradient), case.shards(expect, 2), unit) <= BOUND


def test_ring_backward_takes_the_dropout_seed_of_the_call_not_of_the_residuals():
    case = Case(2, seed=8)
    given = {"dropout_prob": 0.5, "dropout_seed": 1}
    _, residuals = run_ring(case, given)
    dy = case.shards(case.dy)
    got = ejkernel._ring_flash_attention_bwd(*arguments(**given), residuals, dy)
    same = ejkernel._ring_flash_attention_bwd(
        *arguments(**given), residuals._replace(dropout_seed=2), dy
    )
    other = ejkernel._ring_flash_attention_bwd(
        *arguments(**(given | {"dropout_seed": 2})), residuals, dy
    )
    assert np.array_equal(got[2], same[2]) and not np.array_equal(got[2], other[2])


def test_a_recipe_takes_the_place_of_float64():
    case = Case(3).rounded("bfloat16")
    o, residuals = ejkernel._ring_flash_attention_fwd(
        *case.inputs("bfloat16"), None, None, *arguments(), recipe="bf16_partials"
    )
    dy = heads_first(case.dy)
    run = rs.ring(*case.natural, dy, workers=3, recipe="bf16_partials")
    assert np.array_equal(load(heads_first(o)), case.shards(run.o, 2))
    got = ejkernel._ring_flash_attention_bwd(
        *arguments(), residuals, case.shards(case.dy), recipe="bf16_partials"
    )
    for name, gradient in zip(NAMES, got[:3], strict=True):
        assert np.array_equal(load(heads_first(gradient)), case.shards(getattr(run, name), 2))
    alone = ejkernel.ring_flash_attention_call(
        *case.inputs("bfloat16"), None, None, *arguments(), recipe="bf16_partials"
    )
    assert np.array_equal(alone, o)


# --- flash attention backward


def log2_lse(lse, fill=np.nan):
    """M [b, h, ceil128(s)]: lse / ln 2, and something that must not be read behind the rows."""
    length = lse.shape[2]
    M = np.full((*lse.shape[:2], -(-length // 128) * 128), fill)
    M[..., :length] = lse / np.log(2.0)
    return M


def flash(case, o, lse, *, bias=None, mask=None, causal=False, M=None, dtype="float64", **given):
    """flash_attention_bwd of a one-rank case, o [B, H, S, D] and lse [B, H, S] of the definition."""
    first = {"dropout_prob": 0.0, "softmax_scale": None, "dropout_seed": None}
    first = {name: given.pop(name, default) for name, default in first.items()}
    dO, q, k, v, o = (store(x, dtype) for x in (case.dy, case.q, case.k, case.v, heads_first(o)))
    return ejkernel.flash_attention_bwd(
        dO,
        q,
        k,
        v,
        bias,
        mask,
        o,
        log2_lse(lse) if M is None else M,
        first["dropout_prob"],
        causal,
        first["softmax_scale"],
        first["dropout_seed"],
        **given,
    )


def check_flash(case, given, options):
    want, truth, scale = case.truth(**options)
    got = flash(case, want.o, want.lse, **given)
    for name, gradient in zip(NAMES, got, strict=True):
        expected, unit = getattr(truth, name), getattr(scale, name)
        # one rounding of M * ln 2 costs |lse| more
        unit = unit * (1 + np.abs(want.lse[np.isfinite(want.lse)]).max())
        assert worst_row_error(heads_first(gradient), expected, unit) <= BOUND, name


FLASH_FEATURES = {name: x for name, x in FEATURES.items() if name != "no window pair"} | {
    "no window pair": ({"sliding_window": (0, 0)}, {}),
}


@pytest.mark.parametrize("feature", FLASH_FEATURES)
@pytest.mark.parametrize(("n", "n_k"), [(6, 6), (4, 7), (7, 4)])
def test_flash_backward_is_the_gradient_with_ends_aligned(feature, n, n_k):
    given, options = FLASH_FEATURES[feature]
    check_flash(Case(1, n=n, n_k=n_k, seed=20), given, options | {"q_offset": n_k - n})


@pytest.mark.parametrize("length", [127, 128, 130])
def test_M_is_padded_to_a_multiple_of_128_and_its_padding_is_not_read(length):
    check_flash(Case(1, n=length, batch=1, heads=2, seed=21), {"causal": True}, {"causal": True})


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_flash_backward_sums_over_the_query_heads_of_a_group(kv_heads):
    case = Case(1, n=4, heads=4, kv_heads=kv_heads, width=4, seed=22)
    check_flash(case, {}, {})


@pytest.mark.parametrize("shape", [(2, 4, 6, 6), (1, 1, 6, 6), (2, 1, 1, 6), (6, 6), (1,)])
def test_flash_bias_is_added_before_the_soft_cap(shape):
    case = Case(1, n=6, seed=23)
    bias = case.random.standard_normal(shape)
    check_flash(
        case,
        {"bias": bias, "logits_soft_cap": 1.2, "softmax_scale": 0.7},
        {"bias": bias, "softcap": 1.2, "scale": 0.7},
    )


@pytest.mark.parametrize("shape", [(2, 4, 6, 6), (1, 1, 6, 6), (2, 1, 1, 6), (6, 6)])
def test_flash_attention_mask_is_broadcast(shape):
    case = Case(1, n=6, seed=24)
    mask = case.random.random(shape) < 0.6
    check_flash(case, {"mask": mask, "causal": True}, {"mask": mask, "causal": True})


def test_segment_ids_must_agree_and_negative_ones_are_padding():
    case = Case(1, n=6, n_k=8, seed=25)
    for_q, for_k = (case.random.integers(-1, 2, (2, n)) for n in (6, 8))
    check_flash(
        case,
        {"q_segment_ids": for_q.astype(np.int32), "kv_segment_ids": for_k},
        {"segments_q": for_q, "segments_k": for_k, "q_offset": 2},
    )


@pytest.mark.parametrize("which", ["q_segment_ids", "kv_segment_ids"])
def test_segment_ids_of_one_side_stand_for_both(which):
    case = Case(1, n=6, seed=26)
    ids = case.random.integers(-1, 2, (2, 6))
    check_flash(case, {which: ids, "causal": True}, {"segments_q": ids, "causal": True})


@pytest.mark.parametrize("feature", ["plain", "causal", "causal window", "dropout"])
def test_cum_seqlens_say_how_many_leading_tokens_a_row_holds(feature):
    given, options = FEATURES[feature]
    lengths_q, lengths_k = [4, 0, 6], [5, 3, 2]
    case = Case(1, n=6, n_k=7, batch=3, seed=27)
    cums = [np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (lengths_q, lengths_k)]
    # Row b of the definition: its own lengths, ends aligned, batch number b for dropout.
    o, lse = np.full((3, 4, 6, 5), np.nan), np.full((3, 4, 6), np.nan)
    expected = [np.zeros(heads_first(x).shape) for x in (case.q, case.k, case.v)]
    for b, (n_q, n_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        q, dy = (heads_first(x[b : b + 1, :n_q]) for x in (case.q, case.dy))
        k, v = (heads_first(x[b : b + 1, :n_k]) for x in (case.k, case.v))
        own = options | {"q_offset": n_k - n_q}
        if "dropout_p" in own:
            own["keep"] = keep_of_batch(b, n_q, n_k, own)
        run = rs.attention(q, k, v, **own)
        o[b, :, :n_q], lse[b, :, :n_q] = run.o[0], run.lse[0]
        truth = rs.attention_backward(q, k, v, dy, **own)
        expected[0][b, :, :n_q] = truth.dq[0]
        expected[1][b, :, :n_k], expected[2][b, :, :n_k] = truth.dk[0], truth.dv[0]
    # What stands in padding is not read.
    for x, lengths in ((case.q, lengths_q), (case.dy, lengths_q), (case.k, lengths_k)):
        for b, n in enumerate(lengths):
            x[b, n:] = np.nan
    got = flash(case, o, lse, cum_seqlens_q=cums[0], cum_seqlens_k=cums[1], **given)
    for gradient, expect in zip(got, expected, strict=True):
        assert np.abs(heads_first(gradient) - expect).max() <= 1e-13
    for gradient, lengths in zip(got, (lengths_q, lengths_k, lengths_k), strict=True):
        for b, n in enumerate(lengths):
            assert (gradient[b, n:] == 0).all()


def keep_of_batch(b, n_q, n_k, options):
    """Rows and keys that batch b would keep in a full batch of at least b + 1 (DROP-1)."""
    probe = np.zeros((b + 1, 4, n_q, 1)), np.zeros((b + 1, 4, n_k, 1))
    # With one-hot values o reads out the kept keys.
    v = np.broadcast_to(np.eye(n_k), (b + 1, 4, n_k, n_k))
    full = {name: options[name] for name in ("dropout_p", "dropout_seed", "q_offset")}
    return rs.attention(*probe, v, **full).o[b : b + 1] > 0


def test_sinks_are_in_M_and_softmax_aux_has_no_further_effect():
    case = Case(1, n=6, seed=28)
    sinks = case.random.standard_normal((4, 2))
    want, truth, _ = case.truth(sinks=sinks)
    plain = flash(case, want.o, want.lse)
    for aux in (sinks, sinks[0], sinks.astype(np.float32)):
        got = flash(case, want.o, want.lse, softmax_aux=aux)
        for name, gradient, other in zip(NAMES, got, plain, strict=True):
            assert np.array_equal(gradient, other)
            assert np.abs(heads_first(gradient) - getattr(truth, name)).max() <= 1e-13


@pytest.mark.rule("BWD-11")
def test_flash_backward_uses_o_and_M_as_given_and_M_is_in_log2_units():
    case = Case(1, n=6, heads=2, seed=29)
    q, k, v = case.natural
    o = case.random.standard_normal(q.shape)
    M = case.random.standard_normal((2, 2, 128)) + 3.0
    given = {"softcap": 1.5, "scale": 0.8}
    got = flash(case, o, np.zeros(0), M=M, logits_soft_cap=1.5, softmax_scale=0.8)
    lse = np.log(2.0 ** M[..., :6])
    expected = dense_given(q, k, v, heads_first(case.dy), o, lse, allowed=True, **given)
    for gradient, expect in zip(got, expected, strict=True):
        assert np.abs(heads_first(gradient) - expect).max() <= 1e-13


def test_a_row_with_M_minus_infinity_sends_no_gradient():
    case = Case(1, n=6, seed=30)
    want = rs.attention(*case.natural)
    lse = np.where(np.arange(6) == 2, -np.inf, want.lse)
    got = flash(case, want.o, lse)
    mask = np.broadcast_to(np.arange(6)[:, None] != 2, (6, 6))
    truth = rs.attention_backward(*case.natural, heads_first(case.dy), mask=mask)
    for name, gradient in zip(NAMES, got, strict=True):
        assert np.abs(heads_first(gradient) - getattr(truth, name)).max() <= 1e-13
    assert (got[0][:, 2] == 0).all()


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_flash_gradients_are_rounded_once_to_the_dtypes_of_the_inputs(name):
    case = Case(1, n=6, seed=31).rounded(name)
    want = rs.attention(*case.natural)
    o = load(store(want.o, name))
    got = flash(case, o, want.lse, dtype=name)
    exact = flash(case, o, want.lse)
    for gradient, float64_gradient in zip(got, exact, strict=True):
        assert gradient.dtype == FORMATS[name].dtype
        assert np.array_equal(gradient, store(float64_gradient, name))


def test_flash_backward_under_a_recipe_is_the_ring_of_one_worker_under_it():
    case = Case(1, n=6, seed=32).rounded("bfloat16")
    run = rs.ring(*case.natural, heads_first(case.dy), workers=1, recipe="bf16")
    # M holds lse / ln 2; the recipe rounds lse back to float32 as it reads it.
    got = flash(case, run.o, run.lse, dtype="bfloat16", recipe="bf16")
    for name, gradient in zip(NAMES, got, strict=True):
        assert np.array_equal(load(heads_first(gradient)), getattr(run, name))


def test_flash_block_sizes_have_no_effect():
    case = Case(1, n=6)
    want = rs.attention(*case.natural)
    got = flash(case, want.o, want.lse, fwd_params={"q_blocksize": 16}, bwd_params=object())
    for gradient, other in zip(got, flash(case, want.o, want.lse), strict=True):
        assert np.array_equal(gradient, other)


# --- refusals


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def with_one(arrays, place, x):
    return [*arrays[:place], x, *arrays[place + 1 :]]


QKV = [zeros(2, 1, 3, 4, 5), zeros(2, 1, 3, 2, 5), zeros(2, 1, 3, 2, 5)]
NOTHING = [None, None]
BIAS, MASK = zeros(2, 1, 4, 3, 6), zeros(2, 1, 4, 3, 6, dtype=bool)

RING_REFUSALS = [
    ("bias and mask", QKV, [MASK, BIAS], {}, RefusedError),
    ("bias with local keys", QKV, [None, zeros(2, 1, 1, 3, 3)], {}, ShapeError),
    ("bias with global rows", QKV, [None, zeros(2, 1, 1, 6, 6)], {}, ShapeError),
    ("bias with ring keys on lone ranks", QKV, [None, BIAS], {"axis_name": None}, ShapeError),
    ("bias without ranks", QKV, [None, BIAS[0]], {}, ShapeError),
    ("bias for three ranks", QKV, [None, zeros(3, 1, 1, 3, 6)], {}, ShapeError),
    ("bias with wrong heads", QKV, [None, zeros(2, 1, 2, 3, 6)], {}, ShapeError),
    ("boolean bias", QKV, [None, MASK], {}, DtypeError),
    ("NaN in bias", QKV, [None, BIAS + np.nan], {}, NonFiniteError),
    ("additive mask", QKV, [BIAS, None], {}, DtypeError),
    ("integer mask", QKV, [MASK.astype(int), None], {}, DtypeError),
    ("mask with wrong batch", QKV, [zeros(2, 3, 1, 3, 6, dtype=bool), None], {}, ShapeError),
    ("heads that do not divide", with_one(QKV, 0, zeros(2, 1, 3, 3, 5)), NOTHING, {}, (ShapeError, "head-count")),
    ("k and v of different shapes", with_one(QKV, 2, zeros(2, 1, 3, 2, 6)), NOTHING, {}, ShapeError),
    ("another head_dim", with_one(QKV, 0, zeros(2, 1, 3, 4, 6)), NOTHING, {}, ShapeError),
    ("another number of ranks", with_one(QKV, 0, zeros(3, 1, 3, 4, 5)), NOTHING, {}, ShapeError),
    ("no axis of ranks", [x[0] for x in QKV], NOTHING, {}, ShapeError),
    ("no ranks", [x[:0] for x in QKV], NOTHING, {}, ShapeError),
    ("integer q", with_one(QKV, 0, QKV[0].astype(int)), NOTHING, {}, DtypeError),
    ("object k", with_one(QKV, 1, QKV[1].astype(object)), NOTHING, {}, DtypeError),
    ("NaN in v", with_one(QKV, 2, QKV[2] + np.nan), NOTHING, {}, NonFiniteError),
    ("a negative window", QKV, NOTHING, {"sliding_window": -1}, (OptionError, "window")),
    ("a negative side", QKV, NOTHING, {"sliding_window": (2, -1)}, (OptionError, "window")),
    ("three sides", QKV, NOTHING, {"sliding_window": (1, 2, 3)}, (OptionError, "window")),
    ("half a window", QKV, NOTHING, {"sliding_window": 1.5}, (OptionError, "window")),
    ("an open side", QKV, NOTHING, {"sliding_window": (None, 1)}, (OptionError, "window")),
    ("a window flag", QKV, NOTHING, {"sliding_window": True}, (OptionError, "window")),
    ("a soft cap of zero", QKV, NOTHING, {"logits_soft_cap": 0.0}, OptionError),
    ("a negative soft cap", QKV, NOTHING, {"logits_soft_cap": -1.0}, OptionError),
    ("all dropped", QKV, NOTHING, {"dropout_prob": 1.0}, (OptionError, "dropout")),
    ("a negative seed", QKV, NOTHING, {"dropout_prob": 0.1, "dropout_seed": -1}, (OptionError, "dropout")),
    ("an axis number", QKV, NOTHING, {"axis_name": 0}, OptionError),
    ("a causal flag that is none", QKV, NOTHING, {"causal": 1}, OptionError),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arrays", "pairs", "given", "error"),
    [case[1:] for case in RING_REFUSALS],
    ids=[case[0] for case in RING_REFUSALS],
)
def test_ring_refuses(arrays, pairs, given, error):
    mask, bias = pairs
    with refuses(error) as caught:
        ejkernel.ring_flash_attention_call(*arrays, mask, bias, *arguments(**given))
    assert "expected" in str(caught.value) and "Fix: " in str(caught.value)
    o, lse = zeros(2, 1, 3, 4, 5), zeros(2, 1, 4, 3)
    residuals = RingFlashResiduals(*arrays, bias, mask, o, lse, None)
    with refuses(error):
        ejkernel._ring_flash_attention_bwd(*arguments(**given), residuals, o)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"o": zeros(2, 1, 4, 3, 5)}, ShapeError),
        ({"lse": zeros(2, 1, 3, 4)}, ShapeError),
        ({"lse": zeros(2, 1, 4, 128)}, ShapeError),
        ({"lse": zeros(2, 1, 4, 3) + np.nan}, NonFiniteError),
        ({"lse": zeros(2, 1, 4, 3) + np.inf}, NonFiniteError),
        ({"o": zeros(2, 1, 3, 4, 5) + np.nan}, NonFiniteError),
        ({"o": zeros(2, 1, 3, 4, 5, dtype=int)}, DtypeError),
    ],
)
def test_ring_backward_refuses_residuals(changes, error):
    good = RingFlashResiduals(*QKV, None, None, zeros(2, 1, 3, 4, 5), zeros(2, 1, 4, 3), None)
    with refuses(error):
        ejkernel._ring_flash_attention_bwd(
            *arguments(), good._replace(**changes), zeros(2, 1, 3, 4, 5)
        )
    with pytest.raises(ShapeError):
        ejkernel._ring_flash_attention_bwd(*arguments(), good, zeros(2, 1, 3, 5, 4))


# dO q k v bias mask o M
FLASH = [zeros(2, 6, 4, 5), zeros(2, 6, 4, 5), zeros(2, 6, 2, 5), zeros(2, 6, 2, 5), None, None]
FLASH += [zeros(2, 6, 4, 5), zeros(2, 4, 128)]
PAIR, SEEN, IDS = zeros(2, 4, 6, 6), zeros(2, 4, 6, 6, dtype=bool), zeros(2, 6, dtype=int)
CUM = np.array([0, 4, 9])
PACKED = {"cum_seqlens_q": CUM, "cum_seqlens_k": CUM}

FLASH_REFUSALS = [
    ("bias and mask", {4: PAIR, 5: SEEN}, {}, RefusedError),
    ("cum_seqlens with bias", {4: PAIR}, PACKED, RefusedError),
    ("cum_seqlens with a mask", {5: SEEN}, PACKED, RefusedError),
    ("cum_seqlens with segment ids", {}, PACKED | {"q_segment_ids": IDS}, RefusedError),
    ("cum_seqlens with key ids", {}, PACKED | {"kv_segment_ids": IDS}, RefusedError),
    ("cum_seqlens_q alone", {}, {"cum_seqlens_q": CUM}, RefusedError),
    ("cum_seqlens_k alone", {}, {"cum_seqlens_k": CUM}, RefusedError),
    ("unsorted cum_seqlens", {}, PACKED | {"cum_seqlens_q": np.array([0, 5, 4])}, (OptionError, "packing")),
    ("cum_seqlens from one", {}, PACKED | {"cum_seqlens_q": CUM + 1}, (OptionError, "packing")),
    ("a row above the batch's length", {}, PACKED | {"cum_seqlens_k": CUM * 2}, (OptionError, "packing")),
    ("cum_seqlens of one row", {}, PACKED | {"cum_seqlens_k": CUM[:2]}, (OptionError, "packing")),
    ("float cum_seqlens", {}, PACKED | {"cum_seqlens_k": CUM * 1.0}, (OptionError, "packing")),
    ("M without padding", {7: zeros(2, 4, 6)}, {}, ShapeError),
    ("M padded too far", {7: zeros(2, 4, 256)}, {}, ShapeError),
    ("M of key heads", {7: zeros(2, 2, 128)}, {}, ShapeError),
    ("NaN in M", {7: zeros(2, 4, 128) + np.nan}, {}, NonFiniteError),
    ("infinity in M", {7: zeros(2, 4, 128) + np.inf}, {}, NonFiniteError),
    ("o heads first", {6: zeros(2, 4, 6, 5)}, {}, ShapeError),
    ("dO of another length", {0: zeros(2, 5, 4, 5)}, {}, ShapeError),
    ("NaN in dO", {0: FLASH[0] + np.nan}, {}, NonFiniteError),
    ("boolean bias", {4: SEEN}, {}, DtypeError),
    ("float mask", {5: PAIR}, {}, DtypeError),
    ("mask that does not broadcast", {5: zeros(2, 3, 6, 6, dtype=bool)}, {}, ShapeError),
    ("bias that does not broadcast", {4: zeros(5, 6)}, {}, ShapeError),
    ("heads that do not divide", {2: zeros(2, 6, 3, 5), 3: zeros(2, 6, 3, 5)}, {}, (ShapeError, "head-count")),
    ("v of another width", {3: zeros(2, 6, 2, 4)}, {}, ShapeError),
    ("integer q", {1: FLASH[1].astype(int)}, {}, DtypeError),
    ("ids of one row", {}, {"q_segment_ids": IDS[0]}, ShapeError),
    ("ids of another length", {}, {"kv_segment_ids": zeros(2, 7, dtype=int)}, ShapeError),
    ("float ids", {}, {"q_segment_ids": IDS * 1.0}, DtypeError),
    ("softmax_aux of wrong heads", {}, {"softmax_aux": zeros(3, 2)}, ShapeError),
    ("softmax_aux of three axes", {}, {"softmax_aux": zeros(1, 4, 2)}, ShapeError),
    ("NaN in softmax_aux", {}, {"softmax_aux": zeros(4, 2) + np.nan}, NonFiniteError),
    ("integer softmax_aux", {}, {"softmax_aux": zeros(4, 2, dtype=int)}, DtypeError),
    ("a negative window", {}, {"sliding_window": (-1, 2)}, (OptionError, "window")),
    ("a soft cap of zero", {}, {"logits_soft_cap": 0}, OptionError),
    ("a dropout of one", {8: 1.0}, {}, (OptionError, "dropout")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "given", "error"),
    [case[1:] for case in FLASH_REFUSALS],
    ids=[case[0] for case in FLASH_REFUSALS],
)
def test_flash_backward_refuses(changes, given, error):
    values = [*FLASH, 0.0, False, None, None]
    for place, x in changes.items():
        values[place] = x
    with refuses(error) as caught:
        ejkernel.flash_attention_bwd(*values, **given)
    assert "expected" in str(caught.value) and "Fix: " in str(caught.value)
