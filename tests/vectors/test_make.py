"""``ringspec vectors make`` and ``vectors.make``: golden values for a shape of one's own."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from mpmath import mp, mpf

from ringspec.cli import main
from ringspec.errors import OptionError, VectorError
from ringspec.formats import load
from ringspec.vectors import check_set, open_set
from ringspec.vectors.format.case import Ring, Shape
from ringspec.vectors.make import MOST_TERMS, make, make_case

SIZES = ["--length", "24", "--heads", "4", "--kv-heads", "2", "--head-dim", "6", "--workers", "3"]
MORE = ["--layout", "striped", "--window", "7,0", "--sinks", "2", "--dlse"]


def ringspec(*arguments, code=0):
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "mine"
    ringspec("vectors", "make", str(folder), *SIZES, *MORE)
    return open_set(folder)


def test_the_set_is_whole_and_has_every_tensor_per_worker(made):
    check_set(made.path)
    tensors = made.tensors("mine/case")
    assert tensors["layout.q"][1].tolist() == list(range(1, 24, 3))
    for name in ("o", "dq", "dk", "dv", "lse", "dsinks"):
        assert any(key.startswith(f"out.{name}.") for key in tensors), name
    assert tensors["out.dk.bfloat16"].shape == (3, 1, 2, 8, 6)
    assert tensors["scale.dq"].shape == (3, 1, 4, 8)


def test_o_and_lse_are_the_real_numbers_rounded_once(made):
    """By mpmath at 60 digits, from the stored inputs, for some queries of every worker."""
    tensors, mp.dps = made.tensors("mine/case"), 60
    scale = mpf(made.case("mine/case").terms["scale"])
    q, k, v, sinks = (load(tensors[f"in.{name}"], name) for name in ("q", "k", "v", "sinks"))
    for worker, slot, head in ((0, 0, 0), (1, 3, 1), (2, 7, 3)):
        i, of_keys = int(tensors["layout.q"][worker, slot]), head // 2
        keys = range(max(0, i - 7), i + 1)
        dot = {
            j: scale
            * mp.fdot(zip(map(mpf, q[0, head, i]), map(mpf, k[0, of_keys, j]), strict=True))
            for j in keys
        }
        total = mp.fsum([mp.exp(s) for s in dot.values()] + [mp.exp(mpf(x)) for x in sinks[head]])
        o = [
            mp.fsum(mp.exp(dot[j]) * mpf(v[0, of_keys, j, d]) for j in keys) / total
            for d in range(6)
        ]
        assert tensors["out.o.float64"][worker, 0, head, slot].tolist() == [float(x) for x in o]
        assert tensors["out.lse.float64"][worker, 0, head, slot] == float(mp.log(total))


def test_the_same_options_give_the_same_bytes_and_another_id_other_inputs(made, tmp_path):
    again = ringspec("vectors", "make", str(tmp_path / "b"), *SIZES, *MORE, "--json")
    assert json.loads(again.stdout)["content"] == made.manifest.content
    ringspec("vectors", "make", str(tmp_path / "c"), *SIZES, *MORE, "--id", "mine/other")
    other = open_set(tmp_path / "c").tensors("mine/other")["in.q"]
    assert (other != made.tensors("mine/case")["in.q"]).any()


def test_dense_attention_has_no_ring(tmp_path):
    ringspec(
        "vectors",
        "make",
        str(tmp_path / "d"),
        "--dense",
        "--length",
        "8",
        "--dtype",
        "f32",
        "--no-backward",
    )
    tensors = open_set(tmp_path / "d").tensors("mine/case")
    assert tensors["out.o.float32"].shape == (1, 2, 8, 16) and "layout.q" not in tensors
    assert not [name for name in tensors if name.startswith("out.dq")]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--length", "65", "--workers", "3"],
        ["--dtype", "int8"],
        ["--id", "../x"],
        ["--layout", "spiral"],
        ["--length", "1048576"],
        ["--softcap", "-1"],
    ],
)
def test_what_is_no_case_is_refused_and_nothing_is_left(tmp_path, arguments):
    result = ringspec("vectors", "make", str(tmp_path / "x"), *arguments, code=2)
    assert "expected" in result.stderr and "Fix:" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_touched(tmp_path):
    case = make_case("mine/a", Shape(1, 1, 1, 4, 4, 2, 2), ring=Ring(2, "contiguous"))
    with pytest.raises(OptionError):
        make(tmp_path, [case])
    with pytest.raises(VectorError):
        make(tmp_path / "twice", [case, case])
    assert list(tmp_path.iterdir()) == []


def test_a_problem_that_would_take_hours_is_refused_at_once():
    with pytest.raises(OptionError, match=str(MOST_TERMS)):
        make_case("mine/a", Shape(1, 32, 8, 65536, 65536, 128, 128))
    assert np.prod([32, 65536.0, 65536, 256]) > MOST_TERMS
