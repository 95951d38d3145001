"""TransformerEngine's all_gather with FlashAttention 3, a window and documents of two lengths: is o right? In 2.20.2: no.

    pip install torch==2.13.0; pip install --no-deps transformer_engine==2.20.2
    python transformer_engine_all_gather_documents.py [same]

Calls ``attn_forward_func_with_cp`` for each of two ranks, one after the other in one process on a CPU. context_parallel.py
is that of the package; mocks replace its other modules, which need a GPU. FlashAttention 3 is dense float64 attention here;
its window ends at the last used query and key of a document. o is compared with dense float64 attention of the documents.
With documents of one length ("same") o is right. Exit status: 1 if a result is wrong, 0 if all are right.
"""

import sys
from contextlib import nullcontext
from enum import Enum
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from unittest.mock import MagicMock

import torch

# Documents of 4 and 16 tokens, one head, D = 1, scale = 1. A document has 4 chunks; rank r has the chunks r and 3 - r of each.
LENGTHS, WINDOW = (8, 8) if "same" in sys.argv else (4, 16), (0, 4)  # tokens back and forward
Q, K, V = torch.randn(3, sum(LENGTHS), dtype=torch.double, generator=torch.manual_seed(1))
CHUNKS = torch.cat([torch.arange(n) // (n // 4) for n in LENGTHS])
TOKENS = [[t for t, c in enumerate(CHUNKS) if c in (r, 3 - r)] for r in range(2)]
ORDER, LONG = torch.tensor(sum(TOKENS, [])), max(LENGTHS)
STARTS = torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=torch.int32)
ROOT = find_spec("transformer_engine").submodule_search_locations[0]
RING = "transformer_engine.pytorch.attention.dot_product_attention.context_parallel"


def attention(q, k, v, window):
    distance = torch.arange(len(k)) - torch.arange(len(q))[:, None] - (len(k) - len(q))
    hidden = (distance < -window[0]) | (distance > window[1])
    return torch.outer(q, k).masked_fill(hidden, -torch.inf).softmax(1).nan_to_num() @ v


def flash(q, k, v, *given, window_size_left, window_size_right, **rest):
    """_flash_attn_forward of FlashAttention 3, with the positional arguments of context_parallel.py."""
    o = torch.zeros_like(q)
    for a, b, n, m in zip(given[4][:-1], given[5][:-1], given[7], given[8], strict=True):
        parts = q[a : a + n].flatten(), k[b : b + m].flatten(), v[b : b + m].flatten()
        o[a : a + n] = attention(*parts, (window_size_left, window_size_right)).view(-1, 1, 1)
    return o, torch.zeros(1)


def copied(out, x, starts, valid):
    for a, n in zip(starts[:-1], valid.diff(), strict=True):
        out[a : a + n] = x[a : a + n]


class Mocks:
    """Finds context_parallel.py; every other module of TransformerEngine is a mock with the names in ``known``."""

    known = {
        "jit_fuser": lambda function: function,
        "dist_group_type": object,
        "CPLoadBalancingStrategy": Enum("Strategy", "DUAL_CHUNK_SWAP NO_LOAD_BALANCE"),
        "QuantizedTensorStorage": type("QuantizedTensorStorage", (), {}),
        "get_cudnn_version": lambda: (9, 18, 0),
        "get_distributed_world_size": lambda group: 2,
        "prepare_for_saving": lambda *x: ((), ()),
        "get_attention_quantizers": lambda *x: [None] * 6,
        "_flash_attn_fwd_v3": flash,
        "thd_cp_rank_order_to_sequence_order": lambda x, *rest: x[ORDER.argsort()],
        "thd_copy_valid_tokens_from_per_split_to_rank_local": copied,
    }

    def find_spec(self, name, path=None, target=None):
        if name == RING:
            return spec_from_file_location(name, f"{ROOT}{name[18:].replace('.', '/')}.py")
        if name.startswith("transformer_engine"):
            return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return MagicMock(**self.known)

    def exec_module(self, module): ...


if __name__ == "__main__":
    sys.meta_path.insert(0, Mocks())
    torch.cuda.current_stream, torch.cuda.stream = MagicMock(), lambda stream: nullcontext()
    ring, wrong = import_module(RING), False
    wants = torch.cat([*map(attention, *(x.split(LENGTHS) for x in (Q, K, V)), [WINDOW] * 2)])
    for rank, tokens in enumerate(TOKENS):
        every = [x[ORDER].view(-1, 1, 1) for x in (K, V)]  # what the all-gathers return
        ring.get_distributed_rank = lambda group, rank=rank: rank
        ring.gather_along_first_dim = lambda x, group, every=every: (every.pop(0), None)
        o = ring.attn_forward_func_with_cp(
            *(True, *(x[tokens].view(-1, 1, 1) for x in (Q, K, V)), STARTS, STARTS, LONG, LONG),
            *(STARTS, STARTS, 0.0, None, [0, 1], MagicMock(), "all_gather", 1.0, "thd", "padding"),
            **{"window_size": WINDOW, "use_flash_attn_3": True},
        )
        for token, found, want in zip(tokens, o.flatten(), wants[tokens], strict=True):
            wrong |= not (right := abs(found - want) <= 1e-12)
            said = "right" if right else "WRONG"
            print(f"{said}: o of worker {rank}, token {token}: got {found:.7f}, float64 {want:.7f}")
    sys.exit(1 if wrong else 0)
