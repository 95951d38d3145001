"""yunchang checked by hand: a program without ringspec, run by test_yunchang.py.

    python by_hand_yunchang.py WHAT ORDER KERNEL DTYPE WORKERS full|causal|window [noise|many-heads]

WHAT: ring, zigzag, stripe, ulysses, usp, usp-zigzag or usp-strip. ORDER: low or high, the groups of
``set_seq_parallel_pg(use_ulysses_low=...)``. KERNEL: a value of yunchang's AttnType. window: causal, and at most 5
tokens back. noise, many-heads: the tokens, heads, head dimension and window (100) of the suite's cases 'noise/' and
'noise/many-heads-bf16'. Processes under gloo run the unmodified package; flash-attn's two functions are those of
by_hand_zhuzilin.py, dense in float64, and so is the forward pass of ATen's flash operator, which has no CPU
implementation. yunchang's ``EXTRACT_FUNC_DICT`` gives each rank of USP and of the contiguous rings its tokens. The
results are compared with dense float64 attention of the whole sequence. Prints JSON: for o, dq, dk and dv if the
kernel has a backward pass, and lse of a ring, the largest error of each rank, divided by the largest number, and how
many numbers are not representable in bfloat16.
"""

import json
import sys
import types
from importlib.machinery import ModuleSpec

import by_hand_zhuzilin as dense
from by_hand_ranks import on_ranks

SCALE = 0.25
SIZES = {"noise": (4, 384, 64, (100, 0)), "many-heads": (64, 128, 64, (100, 0))}
B, H, TOKENS, D, WINDOW = 1, 4, 0, 16, (5, 0)  # TOKENS 0: 8 for each worker
for word in sys.argv[7:]:  # spawned processes have the same words
    H, TOKENS, D, WINDOW = SIZES[word]
NAMES = ("o", "dq", "dk", "dv", "lse")
RINGS = {
    "ring": "ring_flash_attn_func",
    "zigzag": "zigzag_ring_flash_attn_func",
    "stripe": "stripe_flash_attn_func",
}


def imported():
    """Import yunchang over the two functions of by_hand_zhuzilin."""
    package, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn_interface")
    package.__path__, package.__spec__ = [], ModuleSpec("flash_attn", None, is_package=True)
    package.__version__, package.flash_attn_func = "2.8.3", None
    for name in ("_flash_attn_forward", "_flash_attn_backward"):
        setattr(interface, name, getattr(dense, name))
        setattr(interface, name.replace("attn", "attn_varlen"), None)
    sys.modules |= {"flash_attn": package, "flash_attn.flash_attn_interface": interface}
    import yunchang

    return yunchang


def aten_forward(
    query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):
    import torch

    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    s = dense.scores(q, k, is_causal, scale)
    lse, empty = s.logsumexp(3), torch.empty(0)
    o = torch.einsum("bhij,bjhd->bhid", (s - lse[..., None]).exp(), v.double())
    return o.to(q.dtype), lse.float(), empty, empty, q.shape[1], k.shape[1], empty, empty, empty


def tokens_of_each(workers):
    return TOKENS // workers or 8


def inputs(dtype, workers):
    import torch

    made = torch.Generator().manual_seed(7)
    size = (B, tokens_of_each(workers) * workers, H, D)
    return [torch.randn(size, generator=made, dtype=torch.float64).to(dtype) for _ in range(4)]


def attention(yunchang, what, order, kernel, rank, workers):
    import torch.distributed as dist
    from yunchang.kernels import AttnType

    if what == "ulysses":
        return yunchang.UlyssesAttention(attn_type=AttnType.from_string(kernel))
    if what in RINGS:
        return lambda *x, **rest: getattr(yunchang, RINGS[what])(
            *x,
            group=dist.group.WORLD,
            attn_type=AttnType.from_string(kernel),
            return_attn_probs=True,
            **rest,
        )
    return yunchang.LongContextAttention(
        ring_impl_type=what.partition("-")[2] or "basic", attn_type=AttnType.from_string(kernel)
    )


def tokens_of(yunchang, what, order, rank, workers):
    """Return the tokens of a rank: of a ring alone, two chunks with zigzag, and every W-th token with stripe."""
    import torch

    numbers = torch.arange(tokens_of_each(workers) * workers)
    if what == "zigzag":
        chunks = numbers.chunk(2 * workers)
        return torch.cat([chunks[rank], chunks[-1 - rank]])
    if what == "stripe":
        return numbers[rank::workers]
    if what.startswith("usp"):
        low = order == "low"
        yunchang.set_seq_parallel_pg(2, workers // 2, rank, workers, use_ulysses_low=low)
    extract = yunchang.EXTRACT_FUNC_DICT[what.partition("-")[2] or "basic"]
    return extract(numbers[None, :, None], rank, workers, rd=workers // 2, ud=2).flatten()


def rank_results(rank, workers, what, order, kernel, dtype, mask):
    import torch

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", aten_forward, "CPU")
    yunchang = imported()
    tokens = tokens_of(yunchang, what, order, rank, workers)
    q, k, v, dy = (x[:, tokens].contiguous() for x in inputs(getattr(torch, dtype), workers))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    function = attention(yunchang, what, order, kernel, rank, workers)
    named = {"window_size": WINDOW} if mask == "window" else {}
    o = function(*leaves, softmax_scale=SCALE, causal=mask != "full", **named)
    o, lse = o[:2] if what in RINGS else (o, None)
    results = [o]
    if kernel == "fa":
        o.backward(dy)
        results += [x.grad for x in leaves]
    if lse is not None:
        results.append(lse.transpose(1, 2))
    return tokens.tolist(), [x.detach().double().tolist() for x in results]


def right(dtype, workers, mask):
    """o, dq, dk, dv of the whole sequence, in float64, by autograd of a dense softmax."""
    import torch

    q, k, v, dy = (x.double() for x in inputs(dtype, workers))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    window = WINDOW if mask == "window" else ()
    scores = dense.scores(q, k, mask != "full", SCALE, *window)
    p, lse = scores.softmax(3), scores.logsumexp(3).transpose(1, 2)
    o = torch.einsum("bhij,bjhd->bihd", p, v)
    o.backward(dy)
    return [x.detach() for x in (o, *(x.grad for x in leaves), lse)]


def main(what, order, kernel, dtype, workers, mask):
    import torch

    got = on_ranks(workers, rank_results, workers, what, order, kernel, dtype, mask)
    report = {}
    for number, (name, want) in enumerate(
        zip(NAMES, right(getattr(torch, dtype), workers, mask), strict=True)
    ):
        if number == len(got[0][1]):
            break
        parts = [torch.tensor(results[number], dtype=torch.float64) for _, results in got]
        errors = zip(parts, (want[:, tokens] for tokens, _ in got), strict=True)
        report[name] = {
            "errors": [float((x - y).abs().max() / want.abs().max()) for x, y in errors],
            "finer_than_bfloat16": sum(int((x.bfloat16().double() != x).sum()) for x in parts),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:5], int(sys.argv[5]), sys.argv[6])
