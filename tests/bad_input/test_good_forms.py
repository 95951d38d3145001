"""Good input in unusual forms (views, byte orders, NumPy scalars, empty) gives the same result."""

import ml_dtypes
import numpy as np
import pytest
from bad_input.calls import (
    DV,
    DY,
    FUNCTIONS,
    HKV,
    INPUTS,
    RANDOM,
    B,
    D,
    H,
    K,
    Q,
    S,
    V,
    W,
    attention,
    backward,
    only_our_errors,
    ring,
)

import ringspec as rs
from ringspec.rings.layouts import make_layout

FULL = {
    "causal": True,
    "window": (4, 1),
    "scale": 0.5,
    "softcap": 2.0,
    "bias": RANDOM.normal(size=(B, H, S, S)),
    "mask": RANDOM.random((B, H, S, S)) < 0.8,
    "segments_q": RANDOM.integers(-1, 2, (B, S)),
    "segments_k": RANDOM.integers(-1, 2, (B, S)),
    "bound_min": RANDOM.integers(0, 3, (B, S)),
    "bound_max": RANDOM.integers(3, 9, (B, S)),
    "sinks": RANDOM.normal(size=(H, 2)),
    "dropout_p": 0.25,
    "dropout_seed": 5,
    "keep": RANDOM.random((B, H, S, S)) < 0.7,
    "positions_q": RANDOM.integers(0, 9, (B, S)),
    "positions_k": RANDOM.integers(0, 9, (B, S)),
}
DLSE = RANDOM.normal(size=(B, H, S))
TABLE = np.array([[5, 0, -1], [-1, 3, 1], [2, -1, 4]])


def everything(inputs: dict, options: dict, dlse, layout) -> list[np.ndarray]:
    """All results of all three functions."""
    q, k, v, dy = (inputs[name] for name in ("q", "k", "v", "dy"))
    forward = rs.attention(q, k, v, **options)
    gradients = rs.attention_backward(q, k, v, dy, dlse=dlse, **options)
    run = rs.ring(q, k, v, dy, dlse=dlse, workers=3, layout=layout, circulation="q", **options)
    names = ("dq", "dk", "dv", "dsinks", "dbias")
    return [
        forward.o, forward.lse, *(getattr(gradients, name) for name in names),
        run.o, run.lse, *(getattr(run, name) for name in names),
    ]  # fmt: skip


WANT = everything(INPUTS, FULL, DLSE, TABLE)


def form(change) -> list[np.ndarray]:
    """All results with every array changed to another form of the same values."""

    def changed(x):
        return change(x) if isinstance(x, np.ndarray) else x

    inputs = {name: changed(x) for name, x in INPUTS.items()}
    options = {name: changed(x) for name, x in FULL.items()}
    return everything(inputs, options, changed(DLSE), changed(TABLE))


def strided(x: np.ndarray) -> np.ndarray:
    """The same values as every second element of a larger array, in falling memory order."""
    wide = np.repeat(x[..., ::-1], 2, axis=-1)
    return wide[..., ::-2]


def read_only(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


def swapped(x: np.ndarray) -> np.ndarray:
    return x.astype(x.dtype.newbyteorder("S"))


FORMS = {
    "Fortran order": np.asfortranarray,
    "strided views": strided,
    "broadcast views": lambda x: np.broadcast_to(x[None], (2, *x.shape))[1],
    "read-only": read_only,
    "foreign byte order": swapped,
    "nested lists": lambda x: x.tolist(),
    "subclass": lambda x: x.view(type("Mine", (np.ndarray,), {})),
}


@pytest.mark.parametrize("what", FORMS)
def test_the_form_of_an_array_does_not_change_a_bit_of_any_result(what):
    for got, want in zip(form(FORMS[what]), WANT, strict=True):
        assert type(got) is np.ndarray and got.dtype == np.float64
        assert got.shape == want.shape and got.tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", ">u2", "u4", ">i8", "u8"])
def test_the_integer_dtype_does_not_change_a_bit_of_any_result(dtype):
    """Values from 0 on only, as unsigned dtypes need; padding as segment 2 against 3."""
    options = FULL | {"segments_q": FULL["segments_q"] % 3, "segments_k": FULL["segments_k"] % 3}
    want = everything(INPUTS, options, DLSE, "striped")
    changed = {
        name: x.astype(dtype) if isinstance(x, np.ndarray) and x.dtype.kind == "i" else x
        for name, x in options.items()
    }
    for got, expected in zip(everything(INPUTS, changed, DLSE, "striped"), want, strict=True):
        assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16,
                                   ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])  # fmt: skip
def test_narrow_inputs_are_taken_at_their_values(dtype):
    narrow = {name: x.astype(dtype) for name, x in INPUTS.items()}
    same = {name: x.astype(np.float64) for name, x in narrow.items()}
    want = everything(same, FULL, DLSE, TABLE)
    for got, expected in zip(everything(narrow, FULL, DLSE, TABLE), want, strict=True):
        assert got.dtype == np.float64 and got.tobytes() == expected.tobytes()


NUMBERS = {"window": 2, "q_offset": 1, "dropout_seed": 3, "scale": 0.5, "softcap": 2.0,
           "dropout_p": 0.25, "causal": True}  # fmt: skip


@pytest.mark.parametrize("integer", [np.int8, np.uint8, np.int16, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("real", [np.float16, np.float32, np.float64])
def test_numpy_scalars_are_taken_as_numbers(integer, real):
    want = ring(direction=-1, **NUMBERS)
    kinds = {int: integer, float: real, bool: np.bool_}
    got = ring(**{name: kinds[type(x)](x) for name, x in NUMBERS.items()}, direction=-1)
    for name in ("o", "lse", "dq", "dk", "dv"):
        assert (getattr(got, name) == getattr(want, name)).all()
    window = (integer(2), None)
    assert (attention(window=window).o == attention(window=(2, None)).o).all()


@pytest.mark.parametrize(
    "integer",
    [np.int8, np.int16, np.int64, np.uint8, np.uint32, np.uint64],
)
@pytest.mark.parametrize("circulation", ["kv", "q", "gather"])
@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
def test_the_number_of_workers_may_be_a_numpy_integer(integer, circulation, layout):
    want = ring(circulation=circulation, layout=layout, causal=True)
    got = ring(workers=integer(W), circulation=circulation, layout=layout, causal=True)
    for name in ("o", "lse", "dq", "dk", "dv"):
        assert (getattr(got, name) == getattr(want, name)).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("workers", [np.int8(64), np.uint8(128)])
def test_narrow_numpy_integers_do_not_wrap_round(workers):
    length = 4 * int(workers)
    assert (
        make_layout("zigzag", length, workers).table
        == make_layout("zigzag", length, int(workers)).table
    ).all()


def test_inputs_are_never_changed():
    """Bytes of every array before and after all functions, with recording and every circulation."""
    arrays = {**INPUTS, **{n: x for n, x in FULL.items() if isinstance(x, np.ndarray)},
              "dlse": DLSE, "table": TABLE}  # fmt: skip
    before = {name: x.tobytes() for name, x in arrays.items()}
    everything(INPUTS, FULL, DLSE, TABLE)
    for circulation in ("kv", "q", "gather"):
        for recipe in ("float64", "bf16_partials", "nki"):
            ring(
                **FULL, dlse=DLSE, layout=TABLE, circulation=circulation, recipe=recipe, record=True
            )
    assert {name: x.tobytes() for name, x in arrays.items()} == before


def test_results_share_no_memory_with_inputs():
    inputs = {name: x.copy() for name, x in INPUTS.items()}
    options = {name: x.copy() if isinstance(x, np.ndarray) else x for name, x in FULL.items()}
    for result in everything(inputs, options, DLSE, TABLE):
        for x in [*inputs.values(), *options.values()]:
            assert not isinstance(x, np.ndarray) or not np.shares_memory(result, x)


@pytest.mark.parametrize("name", ["mask", "keep"])
def test_a_recorded_run_does_not_change_with_the_callers_arrays(name):
    pairs = RANDOM.random((1, S)) < 0.7  # the same for all rows
    run = ring(**{name: pairs}, record=True)
    before = [moment.after.o for moment in run.replay() if moment.phase == "forward"]
    pairs[:] = ~pairs
    after = [moment.after.o for moment in run.replay() if moment.phase == "forward"]
    assert all((a == b).all() for a, b in zip(after, before, strict=True))


# --- sequences without tokens -----------------------------------------------------------------

EMPTY_LAYOUTS = ("contiguous", "striped", "zigzag")


@pytest.mark.rule("FWD-8", "BWD-10")
@pytest.mark.parametrize("sinks", [None, np.zeros((H, 2))], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("circulation", ["kv", "q", "gather"])
@pytest.mark.parametrize("layout", EMPTY_LAYOUTS)
def test_no_key_gives_empty_rows_or_rows_of_sinks(layout, circulation, sinks):
    options = {"k": K[:, :, :0], "v": V[:, :, :0], "bias": np.zeros((S, 0)), "sinks": sinks,
               "mask": np.ones((S, 0), bool), "causal": True, "softcap": 1.0}  # fmt: skip
    want = -np.inf if sinks is None else np.log(2.0)
    run = ring(**options, layout=layout, circulation=circulation, dlse=DLSE)
    for result in (attention(**options), run):
        assert (result.o == 0).all() and result.o.shape == (B, H, S, DV)
        assert (
            (abs(result.lse - want) <= 1e-15).all()
            if sinks is not None
            else (result.lse == want).all()
        )
    for result in (backward(**options, dlse=DLSE), run):
        assert (result.dq == 0).all() and result.dk.shape == (B, HKV, 0, D)
        assert result.dv.shape == (B, HKV, 0, DV) and result.dbias.shape == (S, 0)
        if sinks is not None:  # both sinks of a head share dlse
            half = DLSE.sum(axis=(0, 2)) / 2
            assert (abs(result.dsinks - half[:, None]) <= 1e-13).all()


@pytest.mark.parametrize("circulation", ["kv", "q", "gather"])
@pytest.mark.parametrize("layout", EMPTY_LAYOUTS)
def test_no_query_gives_no_row_and_zero_gradients(layout, circulation):
    options = {"q": Q[:, :, :0], "dy": DY[:, :, :0], "bias": np.zeros((H, 0, S)),
               "mask": np.ones((0, S), bool), "causal": True, "sinks": np.zeros(H)}  # fmt: skip
    run = ring(**options, layout=layout, circulation=circulation)
    for result in (attention(**options), run):
        assert result.o.shape == (B, H, 0, DV) and result.lse.shape == (B, H, 0)
    for result in (backward(**options), run):
        assert result.dq.shape == (B, H, 0, D) and result.dk.shape == K.shape
        assert (result.dk == 0).all() and (result.dv == 0).all() and (result.dsinks == 0).all()


def test_padding_slots_alone_hold_no_key():
    layout = ("contiguous", [[-1], [-1], [-1]])
    run = ring(k=K[:, :, :0], v=V[:, :, :0], bias=np.zeros((S, 0)), layout=layout)
    assert (run.o == 0).all() and (run.lse == -np.inf).all()


NO_TOKEN = {
    "positions_q": ("q", {"positions_q": np.zeros(0, int)}),
    "positions_k": ("k", {"positions_k": np.zeros((B, 0), int)}),
    "segments": ("k", {"segments_q": np.zeros(S, int), "segments_k": np.zeros(0, int)}),
    "bounds": ("q", {"bound_min": np.zeros(0, int), "bound_max": np.zeros((1, 0), int)}),
}


@pytest.mark.parametrize("case", NO_TOKEN)
def test_options_of_no_token_go_with_no_token(case):
    side, options = NO_TOKEN[case]
    if side == "q":
        options = options | {"q": Q[:, :, :0], "dy": DY[:, :, :0]}
    else:
        options = options | {"k": K[:, :, :0], "v": V[:, :, :0]}
    for function in FUNCTIONS:
        only_our_errors(lambda function=function: function(**options))
    assert attention(**options).o.shape[2] == (0 if side == "q" else S)


def test_documents_of_no_token_are_allowed():
    options = {"k": K[:, :, :0], "v": V[:, :, :0], "cu_seqlens": [0, S], "cu_seqlens_k": [0, 0, 0]}
    assert (attention(**options).lse == -np.inf).all()
    run = ring(**options, workers=1, layout="zigzag_per_document")
    assert (run.o == 0).all() and (run.lse == -np.inf).all()
