"""The PyTorch adapter: what an author's function gives comes back, and what goes wrong has its name."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conformance.diagnose.named_faults import ID, NAMED, assert_named
from refusals import refuses

from ringspec.conformance.adapters.torch_pool import LOG_BYTES
from ringspec.conformance.adapters.torch_processes import TorchTarget, function_spec
from ringspec.conformance.cases import golden
from ringspec.conformance.cases.calls import call_of, expected_of, forward_alone
from ringspec.conformance.run.suite import run
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import (
    Crashed,
    Exited,
    Failed,
    Garbage,
    Mutated,
    Refused,
    TimedOut,
)
from ringspec.errors import OptionError
from ringspec.formats import unit_roundoff
from ringspec.vectors import open_set

torch = importlib.import_module("torch") if importlib.util.find_spec("torch") else None
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(os.name != "posix", reason="processes of POSIX"),
]

FUNCTIONS = Path(__file__).parent / "torch_functions.py"
CORE = open_set("core")
TENSORS = ("o", "lse", "dq", "dk", "dv")
TURNS = ("print", "float16", "wrong worker", "mutate", "NaN")


CLAIMS = Capabilities(layouts=("zigzag",), formats=("float32",), recipe="float32")


def target(name, claims=None, **settings):
    return TorchTarget(f"{FUNCTIONS}:{name}", claims or Capabilities(), **settings)


@pytest.fixture
def made():
    """Makes targets, and closes them."""
    targets = []

    def make(name, **settings):
        targets.append(target(name, **settings))
        return targets[-1]

    yield make
    for one in targets:
        one.close()


def case_call(id):
    case, tensors = CORE.case(id), CORE.tensors(id)
    return call_of(case, tensors), expected_of(case, tensors)


def worst_error(result, expected, names=TENSORS):
    """Largest error of any row, in units of its scale."""
    errors = []
    for name in names:
        for got, want, scale in zip(
            getattr(result, name), expected[name].values, expected[name].scale, strict=True
        ):
            error = abs(got.astype(np.float64) - want)
            errors.append((error / (scale if name == "lse" else scale[..., None])).max())
    return float(np.max(errors))


def test_a_rank_that_is_debugged_is_in_this_process_and_gives_the_same(made, tmp_path):
    one = made("tells_its_process", options={"folder": str(tmp_path)})
    calls = [case_call(id)[0] for id in ("ring/zigzag-causal-w3", "ring/zigzag-causal-w2")]
    apart = [one.run(call) for call in calls]
    assert str(os.getpid()) not in {path.read_text() for path in tmp_path.iterdir()}
    one.debug(1)
    for call, before in zip([*calls, calls[0]], [*apart, apart[0]], strict=True):
        result = one.run(call)
        for name in TENSORS:
            pairs = zip(getattr(result, name), getattr(before, name), strict=True)
            assert all(np.array_equal(a, b) for a, b in pairs)
        ranks = {rank: tmp_path / f"{call.workers}-{rank}" for rank in range(call.workers)}
        here = [rank for rank, path in ranks.items() if path.read_text() == str(os.getpid())]
        assert here == [1]
    one.close()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_of_a_rank_ends_the_call_whichever_is_debugged(made, rank):
    one = made("raises")
    one.debug(rank)
    with pytest.raises(Failed, match="worker 1 raised an exception(.|\n)*ZeroDivisionError"):
        one.run(case_call("ring/zigzag-causal-w2")[0])


@pytest.mark.parametrize(
    "id", ["ring/contiguous-causal-w2", "ring/zigzag-causal-w3", "ring/float32-zigzag-w4"]
)
def test_results_of_every_worker_come_back_in_the_dtype_of_the_call(made, id):
    call, expected = case_call(id)
    result = made("gathered_attention").run(call)
    for name in ("o", "dq", "dk", "dv"):
        assert [x.dtype for x in getattr(result, name)] == [
            call.tensors["q"][0].dtype
        ] * call.workers
    # The function computes bfloat16 in bfloat16 throughout.
    assert worst_error(result, expected) <= 8 * unit_roundoff(call.formats["inputs"])


def test_processes_stay_alive_between_calls_and_end_with_close(made):
    one = made("gathered_attention")
    call, _ = case_call("ring/contiguous-causal-w2")
    first, before = one.run(call), [p.process.pid for p in one.pools[2].processes]
    again = one.run(call)
    assert [p.process.pid for p in one.pools[2].processes] == before
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first.dq, again.dq, strict=True))
    pool = one.pools[2]
    one.close()
    assert all(p.process.poll() is not None for p in pool.processes)
    assert not pool.folder.exists() and not one.pools


def test_pools_that_were_not_used_for_longest_are_ended_first(made):
    one = made("gathered_attention", pools=1)
    for id in ("ring/contiguous-causal-w2", "ring/contiguous-causal-w1"):
        one.run(case_call(id)[0])
    assert list(one.pools) == [1]


def test_a_forward_alone_gives_no_gradients(made):
    call, _ = case_call("ring/contiguous-causal-w2")
    result = made("gathered_attention").run(forward_alone(call))
    assert result.o is not None and result.dq is None


def test_what_the_target_prints_is_no_answer(made):
    call, expected = case_call("ring/contiguous-causal-w2")
    assert worst_error(made("prints").run(call), expected) <= 2**-5


def test_options_reach_the_function(made):
    call, _ = case_call("ring/contiguous-causal-w2")
    plain = made("gathered_attention").run(call)
    doubled = made("scaled", options={"factor": 2}).run(call)
    assert np.array_equal(doubled.o[1].astype(np.float64), 2 * plain.o[1].astype(np.float64))


def test_the_gradient_of_lse_counts(made):
    call, _ = case_call("ring/contiguous-causal-w2")
    ones = tuple(np.ones(q.shape[:3], np.float32) for q in call.tensors["q"])
    silent = tuple(np.zeros_like(dy) for dy in call.tensors["dy"])
    alone = dataclasses.replace(call, tensors={**call.tensors, "dy": silent, "dlse": ones})
    result = made("gathered_attention").run(alone)
    assert not any(dv.astype(np.float64).any() for dv in result.dv)
    assert all(dk.astype(np.float64).any() for dk in result.dk)


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("crashes", Crashed, "worker 1 was ended by SIGSEGV"),
        ("hangs", TimedOut, "no answer from worker"),
        ("leaves", Exited, "worker 0 ended with exit status 3"),
        ("raises", Failed, "ZeroDivisionError: no tokens"),
        ("refuses", Refused, "not on a Saturday"),
        ("mutates", Mutated, "worker 1 changed its input k"),
        ("of_no_tensor", Failed, "expected o as a torch tensor"),
        ("no_such_function", Failed, "has no attribute 'no_such_function'"),
        ("writes_part_of_a_reply", TimedOut, "no answer from worker (0, )?1 of 2"),
        ("writes_garbage", Garbage, "step 1 of 2"),
        ("forges_a_reply", Garbage, "the reply of worker 1 is not a reply|after the line"),
        ("prints_for_ever", TimedOut, "no answer from worker 0, 1 of 2"),
    ],
)
def test_each_wrong_has_its_name_and_the_next_call_works(made, name, kind, said):
    call, _ = case_call("ring/contiguous-causal-w2")
    one = made(name, timeout=6.0 if kind is TimedOut else 60.0)
    with pytest.raises(kind, match=said) as caught:
        one.run(call)
    assert type(caught.value) is kind
    assert len(getattr(caught.value, "log", "")) <= 3 * LOG_BYTES
    if name == "hangs":  # the log says where each worker was
        assert "torch_functions.py" in caught.value.log and "in hangs" in caught.value.log
    if name == "leaves":
        assert "no space left" in caught.value.log
    one.function = f"{FUNCTIONS}:gathered_attention"
    if kind in (Refused, Mutated):  # nobody waits for anybody: the processes are as they were
        assert all(pool.alive for pool in one.pools.values())
    else:
        assert one.run(call).o is not None


def judged(one):
    """What becomes of the case that all adapters are asked."""
    [case] = [case for case in golden.cases("core") if case.id == ID]
    return run(one, [case]).records[0]


def test_each_fault_with_which_the_processes_live_on_is_named_as_exactly_that(made):
    one = made("wrong_by_turns", claims=CLAIMS)
    for fault in TURNS:
        record = judged(one)
        assert_named(record, fault)
        if fault == "print":
            assert '{"ready": true}' in record.message
        if fault == "float16":
            assert "o of worker 1 is float16" in record.message
        if fault == "mutate":
            assert "worker 1 changed its input k" in record.message
    assert judged(one).outcome == "pass"
    assert len(one.pools) == 1


@pytest.mark.parametrize("fault", ["segfault", "hang"])
def test_each_fault_that_ends_the_processes_is_named_as_exactly_that(made, fault):
    name, seconds = {"segfault": ("crashes", 60.0), "hang": ("hangs", 6.0)}[fault]
    assert_named(judged(made(name, claims=CLAIMS, timeout=seconds)), fault)
    assert {*TURNS, "segfault", "hang"} == set(NAMED)


def test_processes_end_when_the_harness_does(tmp_path):
    program = (
        "import os; from ringspec.conformance.adapters.torch_pool import Pool\n"
        f"setup = dict(function='{FUNCTIONS}:gathered_attention', options={{}}, device='cpu')\n"
        f"import sys; pool = Pool(1, setup, sys.executable, 60.0)\n"
        "print(pool.processes[0].process.pid, pool.folder, flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    pid = int(done.stdout.split()[0])
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists()


def test_under_torchrun_rank_0_drives_and_the_others_answer(tmp_path):
    program = tmp_path / "drive.py"
    program.write_text(
        "import sys\n"
        f"sys.path[:0] = {[str(FUNCTIONS.parents[n]) for n in (0, 2)]!r}\n"
        "from test_torch_adapter import case_call, target, worst_error, Refused\n"
        "one = target('gathered_attention').under_torchrun()\n"
        "assert one.capabilities.workers == (2,)\n"
        "import torch\n"
        "assert one.installed.versions['torch'] == str(torch.__version__)\n"
        "assert one.installed.files['torch'] == torch.__file__\n"
        "for id in ('ring/contiguous-causal-w2', 'ring/zigzag-causal-w2'):\n"
        "    call, expected = case_call(id)\n"
        "    assert worst_error(one.run(call), expected) <= 2**-5\n"
        "try:\n"
        "    one.run(case_call('ring/zigzag-causal-w4')[0])\n"
        "except Refused as refused:\n"
        "    print('refused:', refused)\n"
        "one.close()\n"
        "print('done')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    root = str(Path(__file__).parents[3])
    environment = os.environ | {"PYTHONPATH": root, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, str(program)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [
        "refused: 4 workers: torchrun started 2",
        "done",
    ]


def test_functions_are_found_by_name():
    assert function_spec("a.b:c") == "a.b:c"
    assert function_spec(function_spec).endswith("torch_processes:function_spec")
    assert function_spec("x/y.py:f") == f"{Path('x/y.py').resolve()}:f"
    for wrong in ("nothing", ":f", "a:", lambda: None, 3):
        with pytest.raises(OptionError):
            function_spec(wrong)


def test_wrong_settings_are_refused():
    with refuses((OptionError, "unknown-name"), match="cuda"):
        TorchTarget("a:b", device="cudaa")
    with pytest.raises(OptionError):
        TorchTarget("a:b", pools=0)
