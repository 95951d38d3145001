"""TransformerEngine's all_gather with windows, checked by hand: a program without ringspec and without stand-ins.

    python by_hand_transformer_engine_windows.py BACKEND FORMAT LEFT RIGHT full|causal

BACKEND: fused or fa3. FORMAT: bshd, sbhd, thd (documents of 12, 24 and 6 tokens) or same (two of 24). It takes the source of
``AttnFuncWithCPAndKVAllGather.forward``, of the functions that it calls and of ``fused_attn_fwd`` from the installed
package, unmodified, and runs them for each of three ranks, one after the other in one process. Only the kernels are
written here, dense in float64: a window of FlashAttention 3 ends at the last used query and key; that of cuDNN as
``bottom_right_diagonal`` says, which ``fused_attn_fwd`` passes on. Prints JSON: the largest error of o of each rank,
compared with dense float64 attention of the whole sequence, divided by the largest number of o.
"""

import ast
import enum
import json
import math
import sys
import types
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

W, H, D, SCALE = 3, 2, 16, 0.3
LENGTHS = {"thd": (12, 24, 6), "same": (24, 24), "bshd": (48,), "sbhd": (48,)}
FOLDER = "pytorch/attention/dot_product_attention"
BACKENDS = f"transformer_engine.{FOLDER.replace('/', '.')}.backends"


class Names(dict):
    """A table of names that has every name, as itself."""

    def __missing__(self, name):
        return name


def seen(queries, keys, left, right, bottom_right):
    import torch

    offset = keys - queries if bottom_right else 0
    distance = torch.arange(keys) - torch.arange(queries)[:, None] - offset
    allowed = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        allowed &= distance >= -left
    if right >= 0:
        allowed &= distance <= right
    return allowed


def dense(q, k, v, allowed):
    """Attention [S, H, D] in float64."""
    import torch

    s = torch.einsum("ihd,jhd->hij", q, k) * SCALE
    p = s.masked_fill(~allowed, -torch.inf).softmax(2).nan_to_num()
    return torch.einsum("hij,jhd->ihd", p, v)


def blocks(q, k, v, form, starts_q, starts_k, used_q, used_k, window, bottom_right):
    """Attention of each sequence: o and an lse that the forward pass does not read."""
    import torch

    o = torch.zeros_like(q)
    turned = [x.transpose(0, 1) if form == "sbhd" else x for x in (q, k, v, o)]
    for n, (a, b) in enumerate(zip(used_q, used_k, strict=True)):
        if form == "thd":
            rows, keys = slice(starts_q[n], starts_q[n] + a), slice(starts_k[n], starts_k[n] + b)
            places = [(q, rows), (k, keys), (v, keys), (o, rows)]
        else:
            places = [(x[n], slice(None)) for x in turned]
        one, few, values, into = (x[at] for x, at in places)
        into.copy_(dense(one, few, values, seen(len(one), len(few), *window, bottom_right)))
    return o, torch.zeros(1)


def differences(starts):
    return [b - a for a, b in zip(starts.tolist()[:-1], starts.tolist()[1:], strict=True)]


def fused_kernel(*given):
    """tex.fused_attn_fwd, with its positional arguments."""
    form, mask, window, bottom_right = given[7], given[10], given[12], given[13]
    valid, q, k, v, padded = given[14:16], *given[16:19], given[20:22]
    left, right = window
    starts = [x.tolist() for x in (padded if form == "thd" else valid)]
    used = [differences(x) for x in valid]
    right = 0 if "causal" in mask else right
    return [*blocks(q, k, v, form, *starts, *used, (left, right), bottom_right), None]


def flash_kernel(q, k, v, *given, causal, window_size_left, window_size_right, **rest):
    """_flash_attn_forward of FlashAttention 3, with its positional arguments."""
    starts_q, starts_k, _, used_q, used_k = given[4:9]
    window = (window_size_left, 0 if causal else window_size_right)
    if starts_q is None:
        used = ([q.shape[1]] * q.shape[0], [k.shape[1]] * k.shape[0])
        return blocks(q, k, v, "bshd", [], [], *used, window, True)
    each = [x.tolist() for x in (starts_q, starts_k, used_q, used_k)]
    return blocks(q, k, v, "thd", *each, window, True)


def rows_of(rank, lengths):
    """The tokens of a rank: chunks r and 2 W - 1 - r of each document."""
    found = []
    for first, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
        chunk = length // (2 * W)
        for number in (rank, 2 * W - 1 - rank):
            found += range(first + number * chunk, first + (number + 1) * chunk)
    return found


def published(path, wanted, names):
    """Run the definitions ``wanted`` of a file of the package in the namespace ``names``."""
    [root] = find_spec("transformer_engine").submodule_search_locations
    tree = ast.parse((Path(root) / path).read_text("utf-8"))
    kept = [
        x for x in tree.body if isinstance(x, (ast.FunctionDef, ast.ClassDef)) and x.name in wanted
    ]
    assert {x.name for x in kept} == set(wanted)
    exec(compile(ast.Module(kept, []), path, "exec"), names)  # noqa: S102


def forward_of(rank, gathered, lengths):
    """Return TransformerEngine's forward pass for one rank; ``gathered``: k and v of all ranks, in their order."""
    import torch

    def whole(x, starts, workers, total):
        order = [row for one in range(W) for row in rows_of(one, lengths)]
        made = torch.empty_like(x)
        made[order] = x
        return made

    def copied(out, x, starts, valid):
        for first, length in zip(starts.tolist()[:-1], differences(valid), strict=True):
            out[first : first + length] = x[first : first + length]

    strategy = enum.Enum("CPLoadBalancingStrategy", "DUAL_CHUNK_SWAP NO_LOAD_BALANCE")
    nothing, one_stream = (lambda *_: None), SimpleNamespace(wait_stream=lambda *_: None)
    torch.cuda.current_stream, torch.cuda.stream = lambda *_: one_stream, lambda *_: nullcontext()
    backend = type("Backend", (Names,), {"cast": staticmethod(lambda x: x)})()
    tables = ("QKVLayout", "QKVFormat", "AttnBiasType", "AttnMaskType", "SoftmaxType")
    hints = ("Tuple", "List", "Union", "Optional")
    tex = SimpleNamespace(
        fused_attn_fwd=fused_kernel,
        thd_cp_rank_order_to_sequence_order=whole,
        thd_copy_valid_tokens_from_per_split_to_rank_local=copied,
    )
    names = {
        "torch": torch,
        "math": math,
        "tex": tex,
        "Quantizer": object,
        "FusedAttnBackend": backend,
    }
    names |= {name: __import__("typing").__dict__[name] for name in hints}
    names |= {name: Names({None: None}) for name in tables} | {
        "BACKEND_F16arb_ELTS_PER_THREADS": 16
    }
    names["QKVLayout"] = Names()
    published("pytorch/cpp_extensions/fused_attn.py", ["fused_attn_fwd"], names)
    full = lambda batch, length, device: torch.arange(batch + 1, dtype=torch.int32) * length  # noqa: E731
    names |= {
        "CPLoadBalancingStrategy": strategy,
        "os": __import__("os"),
        "jit_fuser": lambda x: x,
        "get_distributed_world_size": lambda group: W,
        "get_distributed_rank": lambda group: rank,
        "gather_along_first_dim": lambda x, group: (gathered.pop(0), None),
        "nvtx_range_push": nothing,
        "nvtx_range_pop": nothing,
        "_reject_custom_recipe_under_cp": nothing,
        "is_graph_capturing": lambda: False,
        "QuantizedTensorStorage": type("QuantizedTensorStorage", (), {}),
        "FP8GlobalStateManager": SimpleNamespace(get_fp8_recipe=lambda: None),
        "dpa_utils": SimpleNamespace(
            get_attention_quantizers=lambda *_: (None,) * 6, get_full_cu_seqlens=full
        ),
        "fa_utils": SimpleNamespace(v2_3_plus=True, v2_7_0_plus=True),
        "prepare_for_saving": lambda *_: ([], []),
        "_seq_chunk_ids_cache_for_reordering_before_attn": {},
    }
    wanted = (
        "get_bsh_dims get_cu_seqlens_on_cp_rank get_seq_chunk_ids_for_reordering_before_attn get_fa_args"
        " _get_thd_partition_cu_seqlens thd_cp_rank_order_to_sequence_order restore_thd_gathered_kv"
        " get_kv_seq_info_after_all_gather AttnFuncWithCPAndKVAllGather"
    )
    published(f"{FOLDER}/context_parallel.py", wanted.split(), names)
    return names["AttnFuncWithCPAndKVAllGather"].forward, strategy.DUAL_CHUNK_SWAP


def main(backend, form, left, right, mask):
    import torch

    for name in accumulate(BACKENDS.split("."), "{}.{}".format):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    sys.modules[BACKENDS]._flash_attn_fwd_v3 = flash_kernel
    lengths, packed = LENGTHS[form], form in ("thd", "same")
    made = torch.Generator().manual_seed(5)
    q, k, v = torch.randn(3, sum(lengths), H, D, generator=made, dtype=torch.float64)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    allowed = seen(len(q), len(q), left, right, False) & (document[:, None] == document)
    if mask == "causal":
        allowed = allowed.tril()
    want = dense(q, k, v, allowed)
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    kind = {"full": "no_mask", "causal": "causal"}[mask]
    kind = {"no_mask": "padding", "causal": "padding_causal"}[kind] if packed else kind
    axis = 1 if form == "sbhd" else 0
    errors = []
    for rank in range(W):
        own = rows_of(rank, lengths)
        every = [row for one in range(W) for row in rows_of(one, lengths)]
        local = [x[own] if packed else x[own].unsqueeze(axis) for x in (q, k, v)]
        # k and v are gathered with their tokens as the first axis
        gathered = [x[every] if packed else x[every].unsqueeze(1) for x in (k, v)]
        origin = sys.modules.pop("transformer_engine")  # the package itself, for its files
        forward, balance = forward_of(rank, gathered, lengths)
        sys.modules["transformer_engine"] = origin
        ctx = SimpleNamespace(save_for_backward=lambda *_: None)
        o = forward(
            *(ctx, True, *local, starts, starts, max(lengths), max(lengths)),
            *((starts, starts) if packed else (None, None)),
            *(0.0, SCALE, "thd" if packed else form, kind, "no_bias", None, False),
            *(backend == "fused", False, 0.0, (left, right), rank),
            *(SimpleNamespace(wait_stream=lambda *_: None), backend == "fa3", False, False),
            *(False, None, None, False, balance),
        )
        found = o if packed else o.squeeze(axis)
        errors.append(float((found - want[own]).abs().max() / want.abs().max()))
    assert not [name for name in sys.modules if name.split(".")[0] == "ringspec"]
    print(json.dumps({"o": errors}))


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:5]), sys.argv[5])
