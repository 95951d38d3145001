"""TransformerEngine's all_gather with FusedAttention and a window without a causal mask: is o right? In 2.20.2 it is not.

    pip install torch==2.13.0; pip install --no-deps transformer_engine==2.20.2
    python transformer_engine_all_gather_fused.py [sbhd] [causal]

Calls ``attn_forward_func_with_cp`` for each of two ranks, one after the other in one process on a CPU. context_parallel.py
and fused_attn.py are those of the package; mocks replace its other modules, which need a GPU. The compiled function that
fused_attn.py calls is dense float64 attention here: its window ends at the last key if it gets bottom_right_diagonal=True,
otherwise it begins at the first. o is compared with dense float64 attention of all tokens. With a causal mask ("causal")
the flag is passed, and o is right. Exit status: 1 if a result is wrong, 0 if all are right.
"""

import sys
from contextlib import nullcontext
from enum import Enum, IntEnum
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from unittest.mock import MagicMock

import torch

CAUSAL, FORM = "causal" in sys.argv, "sbhd" if "sbhd" in sys.argv else "bshd"
WINDOW = (1, 0 if CAUSAL else 1)  # tokens back and forward
# One token for each of the 2 W chunks, one head, D = 1, scale = 1. Rank r has the chunks r and 2 W - 1 - r.
Q, K, V = (torch.tensor(x).double() for x in ([1.0, 2, 0, 1], [0.0, 1, 2, 1], [1.0, 3, 0, 2]))
TOKENS = ([0, 3], [1, 2])
SHAPE = {"bshd": (1, 2, 1, 1), "sbhd": (2, 1, 1, 1)}[FORM]
ROOT = find_spec("transformer_engine").submodule_search_locations[0]
RING = "transformer_engine.pytorch.attention.dot_product_attention.context_parallel"
REAL = (RING, "transformer_engine.pytorch.cpp_extensions.fused_attn")


def attention(q, k, v, window, bottom_right):
    distance = torch.arange(len(k)) - torch.arange(len(q))[:, None]
    distance = distance - (len(k) - len(q) if bottom_right else 0)
    hidden = (distance < -window[0]) | (distance > window[1])
    return torch.outer(q, k).masked_fill(hidden, -torch.inf).softmax(1).nan_to_num() @ v


def fused_attn_fwd(*given):
    """The compiled function, with the positional arguments that fused_attn.py passes."""
    window, bottom_right, q, k, v = *given[12:14], *given[16:19]
    o = attention(q.flatten(), k.flatten(), v.flatten(), window, bottom_right)
    return [o.view_as(q), torch.zeros(1), None]


class Mocks:
    """Finds the files in REAL; every other module of TransformerEngine is a mock with the names in ``known``."""

    known = {
        "jit_fuser": lambda function: function,
        "dist_group_type": object,
        "CPLoadBalancingStrategy": Enum("Strategy", "DUAL_CHUNK_SWAP NO_LOAD_BALANCE"),
        "NVTE_Fused_Attn_Backend": IntEnum(
            "B", "NVTE_No_Backend NVTE_F16_arbitrary_seqlen NVTE_FP8"
        ),
        "QuantizedTensorStorage": type("QuantizedTensorStorage", (), {}),
        "get_cudnn_version": lambda: (9, 18, 0),
        "get_distributed_world_size": lambda group: 2,
        "prepare_for_saving": lambda *x: ((), ()),
        "get_attention_quantizers": lambda *x: [None] * 6,
        "fused_attn_fwd": fused_attn_fwd,
    }

    def find_spec(self, name, path=None, target=None):
        if name in REAL:
            return spec_from_file_location(name, f"{ROOT}{name[18:].replace('.', '/')}.py")
        ours = name.startswith("transformer_engine")
        return ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec):
        return MagicMock(**self.known)

    def exec_module(self, module): ...


if __name__ == "__main__":
    sys.meta_path.insert(0, Mocks())
    torch.cuda.current_stream, torch.cuda.stream = MagicMock(), lambda stream: nullcontext()
    ring, wrong, wants = import_module(RING), False, attention(Q, K, V, WINDOW, True)
    starts = torch.tensor([0, 4], dtype=torch.int32)
    for rank, tokens in enumerate(TOKENS):
        # What the all-gather returns: the tokens of both ranks, [S, B, H, D], first those of k, then those of v.
        every = [x[sum(TOKENS, [])].view(4, 1, 1, 1) for x in (K, V)]
        ring.get_distributed_rank = lambda group, rank=rank: rank
        ring.gather_along_first_dim = lambda x, group, every=every: (every.pop(0), None)
        o = ring.attn_forward_func_with_cp(
            *(True, *(x[tokens].view(SHAPE) for x in (Q, K, V)), starts, starts, 4, 4, None, None),
            *(0.0, None, [0, 1], MagicMock(), "all_gather", 1.0, FORM),
            attn_mask_type="causal" if CAUSAL else "no_mask",
            use_fused_attention=True,
            window_size=WINDOW,
        )
        for token, found, want in zip(tokens, o.flatten(), wants[tokens], strict=True):
            right = abs(found - want) <= 1e-12
            wrong |= not right
            said = "right" if right else "WRONG"
            print(f"{said}: o of worker {rank}, token {token}: got {found:.7f}, float64 {want:.7f}")
    sys.exit(1 if wrong else 0)
