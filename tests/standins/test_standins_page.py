"""The page docs/conform/standins.md: its example prints what the page shows, and its file connects a ring."""

import re
import sys
from doctest import ELLIPSIS, OutputChecker
from pathlib import Path

import pytest
from click.testing import CliRunner

from ringspec.cli import main
from ringspec.conformance.adapters.torch_processes import TorchTarget

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "conform" / "standins.md").read_text(encoding="utf-8")
EXAMPLE = "docs/conform/example_standin.py:target"

RING = """
import torch
import torch.distributed as dist
from flash_attn import flash_attn_func

def ring_attention(q, k, v, softmax_scale, causal, group):
    whole = []
    for x in (k, v):
        every = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, x.contiguous(), group=group)
        whole.append(torch.cat(every[: dist.get_rank(group) + 1] if causal else every, dim=1))
    return flash_attn_func(q, *whole, softmax_scale=softmax_scale, causal=causal)
"""


def ringspec(*arguments):
    return CliRunner().invoke(main, arguments)


@pytest.mark.torch
@pytest.mark.slow
def test_the_example_prints_what_the_page_shows_and_passes_what_it_claims(monkeypatch):
    monkeypatch.chdir(ROOT)
    shown = re.search(rf"\$ ringspec smoke {EXAMPLE}\n(.*?)```", PAGE, re.S)[1]
    printed = ringspec("smoke", EXAMPLE).stdout
    assert OutputChecker().check_output(shown, printed, ELLIPSIS), printed
    passed, claimed = printed.splitlines()[-1].split()[1:4:2]
    assert passed == claimed


@pytest.mark.torch
@pytest.mark.slow
def test_the_file_on_the_page_connects_a_ring_of_ones_own(tmp_path, monkeypatch):
    """A file as the page says to write it, with a causal ring by gathered keys, passes and fails where it should."""
    lines = re.search(r"   ```python\n(.*?)   ```", PAGE, re.S)[1]
    lines = re.sub(r"^   ", "", lines, flags=re.M)
    lines = lines.replace('("kv",)', '("gather",), operations=("ring-forward",)')
    (tmp_path / "my_ring.py").write_text(RING)
    (tmp_path / "mine.py").write_text(lines)
    monkeypatch.chdir(tmp_path)
    case = "property/workers/causal-contiguous-bf16"
    done = ringspec("replay", "mine.py:target", case)
    assert "passed 1 of 1 claimed" in done.stdout, done.output
    (tmp_path / "my_ring.py").write_text(RING.replace("+ 1]", "+ 2]"))
    assert "mismatch" in ringspec("replay", "mine.py:target", case).stdout


def test_a_target_notes_its_stand_ins_in_the_report():
    target = TorchTarget("package.module:ring", standins="flash_attn==2.6", notes=("first",))
    assert target.standins == ("flash_attn==2.6",) and target.notes[0] == "first"
    assert "stand-in with the interface of flash_attn 2.6" in target.notes[1]
    assert "flash_attn" not in sys.modules
