"""`ringspec.layouts` gives the integers of public code that runs on a CPU: TransformerEngine, and torch."""

import itertools

import numpy as np
import pytest

from ringspec import layouts

PACKS = [
    ((3,), (4,)), ((6,), (8,)), ((4, 4), (4, 4)), ((7, 1, 12), (8, 4, 12)), ((5, 0, 9, 24), (8, 4, 12, 24)),
]  # fmt: skip


def bounds(lengths):
    return [0, *itertools.accumulate(lengths)]


def packs():
    """(workers, lengths, rooms): the packs above, which are for W = 2, scaled to other numbers of workers."""
    for workers, (lengths, rooms) in itertools.product((1, 2, 3, 4), PACKS):
        yield workers, [n * workers // 2 for n in lengths], [n * workers // 2 for n in rooms]


@pytest.fixture
def te():
    from ringspec.standins import installed

    with installed("flash_attn", "transformer_engine_torch"):
        from transformer_engine.pytorch.attention.dot_product_attention import context_parallel

        yield context_parallel


@pytest.mark.transformer_engine
def test_cu_seqlens_on_a_rank_are_those_of_transformer_engine(te):
    import torch

    for workers, lengths, rooms in packs():
        cu, padded = bounds(lengths), bounds(rooms)
        layout = layouts.zigzag_padded(cu, padded, workers)
        ours = layouts.local_cu_seqlens(layout, cu)
        for r in range(workers):
            given = (torch.tensor(cu), torch.tensor(padded) // workers, workers, r)
            theirs = te.get_cu_seqlens_on_cp_rank(*given, True, True)
            assert ours[r].tolist() == theirs.tolist()
            # The front halves alone are chunk r of each document.
            front = te.get_cu_seqlens_on_cp_rank(*given, True, False).diff().tolist()
            held = [max(min(n - r * (m // (2 * workers)), m // (2 * workers)), 0)
                    for n, m in zip(lengths, rooms, strict=True)]  # fmt: skip
            assert front == held


@pytest.mark.transformer_engine
def test_the_batch_of_a_rank_is_that_of_transformer_engine(te, monkeypatch):
    import torch

    for workers, lengths, rooms in packs():
        if workers == 1:
            continue
        padded = bounds(rooms)
        rows = torch.arange(padded[-1])[None]
        positions = torch.cat([torch.arange(room) for room in rooms])
        stored = layouts.zigzag_padded(padded, padded, workers)
        real = layouts.zigzag_padded(bounds(lengths), padded, workers)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None, w=workers: w)
        for r in range(workers):
            monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None, r=r: r)
            ids, _, at = te.get_batch_on_this_cp_rank(torch.tensor(padded), rows, rows, positions)
            assert ids.ravel().tolist() == stored.table[r].tolist()
            ours = layouts.positions(real, bounds(lengths))[r]
            tokens = ours >= 0
            assert ours[tokens].tolist() == np.asarray(at).ravel()[tokens].tolist()


@pytest.mark.torch
def test_head_and_tail_of_torch_is_zigzag():
    balancer = pytest.importorskip(
        "torch.distributed.tensor.experimental._context_parallel._load_balancer"
    )
    for workers, chunk in itertools.product((1, 2, 3, 8), (1, 2, 5)):
        length = 2 * workers * chunk
        theirs = balancer._HeadTailLoadBalancer(length, workers, "cpu")._generate_indices()
        ours = layouts.make_layout("zigzag", length, workers).table
        assert theirs.reshape(workers, -1).tolist() == ours.tolist()


@pytest.mark.torch
def test_each_document_of_torch_is_zigzag_in_document_order():
    """torch lists all workers' parts of a document before the next document; our rows are by worker."""
    name = "torch.distributed.tensor.experimental._context_parallel._load_balancer"
    balancer = pytest.importorskip(name)
    for workers, _, rooms in packs():
        made = balancer._PerDocumentHeadTailLoadBalancer([list(rooms)], workers, "cpu")
        table = layouts.zigzag_padded(bounds(rooms), bounds(rooms), workers).table
        parts = np.split(table, np.array(bounds(rooms))[1:-1] // workers, axis=1)
        ours = np.concatenate([part.ravel() for part in parts])
        assert made._generate_indices().ravel().tolist() == ours.tolist()
