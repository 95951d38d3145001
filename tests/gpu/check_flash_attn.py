"""The stand-in for flash_attn against the kernel of FlashAttention 2 that PyTorch contains, on a GPU.

    python3 tests/gpu/check_flash_attn.py --out DIR [--only 'packed'] [--device cuda]

Each call is made twice through the same interface: with the stand-in 'flash_attn' on the CPU and with
'flash_attn[cuda]', which calls the kernel. Shapes, dtypes, strides, and the places of infinities must be the same. Each
result is compared, element by element, with dense float64 within the bound of its recipe (flash_attn_bounds.py). As a
control, the kernel's results are also compared with float64 of a mask that lacks one key in each row, which must not
fit. Writes flash_attn.json and prints a table; exit status 1 after a difference. Needs torch only, and no flash_attn.
"""

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
from flash_attn_bounds import backward, forward, visible, without_last_key  # noqa: E402
from flash_attn_cases import cases, tensors  # noqa: E402

from ringspec.standins import installed  # noqa: E402

UNTOUCHED = 9.0
FAR = 1e300  # how far an element is off that is NaN, or has an infinity in another place


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args()


def interface(name):
    with installed(name):
        import flash_attn.flash_attn_interface as found
    return found


def options(case):
    return {
        "dropout_p": 0.0,
        "softmax_scale": case.scale,
        "causal": case.causal,
        "window_size_left": case.window[0],
        "window_size_right": case.window[1],
        "softcap": 0.0,
        "alibi_slopes": None,
    }


def lengths(case, device):
    if not case.packed:
        return ()
    return tuple(x.to(device) if isinstance(x, torch.Tensor) else x for x in case.cumulative())


def forward_of(fa, case, q, k, v):
    function = fa._flash_attn_varlen_forward if case.packed else fa._flash_attn_forward
    more = lengths(case, q.device)
    return function(q, k, v, *more, return_softmax=False, **options(case))[:2]


def backward_of(fa, case, dy, q, k, v, o, lse):
    function = fa._flash_attn_varlen_backward if case.packed else fa._flash_attn_backward
    more = lengths(case, q.device)
    buffers = [torch.full_like(x, UNTOUCHED) for x in (q, k, v)]
    function(dy, q, k, v, o, lse, *buffers, *more, deterministic=False, **options(case))
    return buffers


def public(fa, case, q, k, v, dy):
    """o, lse, dq, dk, dv by the public function and autograd."""
    function = fa.flash_attn_varlen_func if case.packed else fa.flash_attn_func
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    keyword = {"softmax_scale": case.scale, "causal": case.causal, "window_size": case.window}
    o, lse, _ = function(*leaves, *lengths(case, q.device), return_attn_probs=True, **keyword)
    o.backward(dy)
    return [o.detach(), lse.detach(), *(x.grad for x in leaves)]


def given_statistics(case, q, k, v, more):
    """The o and lse that a backward pass is given, in the dtypes and layouts in which a forward pass returns them."""
    o, lse = (
        torch.zeros(q.shape, dtype=q.dtype),
        torch.zeros((*q.shape[:-3], q.shape[-2], q.shape[-3])),
    )
    for number, (rows, columns) in enumerate(case.sequences()):
        one, keys, values, extra_k, extra_v = (
            flat(x, case)[place]
            for x, place in zip((q, k, v, *more), (rows, *[columns] * 4), strict=True)
        )
        seen = mask(case, len(one), len(keys))
        if case.kind == "whole":
            keys, values = torch.cat((keys, extra_k)), torch.cat((values, extra_v))
            seen = torch.cat((seen, torch.ones_like(seen)), 1)
        found = forward(one, keys, values, seen, case.scale, case.dtype, "exact")
        flat(o, case)[rows] = found["o"][0].to(o.dtype)
        target = lse[:, rows] if case.packed else lse[number]
        target.copy_(found["lse"][0])
    if case.kind == "infinite":
        lse[..., ::7], lse[..., 1::7] = math.inf, -math.inf
    return o, lse


def flat(x, case):
    """[rows, H, D] of dense or packed tensors."""
    return x if case.packed else x.reshape(-1, *x.shape[2:])


def run(fa, case, device):
    """Results by name on the CPU, their layouts, and the o and lse that the backward pass was given."""
    q, k, v, dy, *more = tensors(case)
    here = [x.to(device) for x in (q, k, v, dy)]
    if case.kind == "public":
        results = public(fa, case, *here)
        used = [x.cpu() for x in results[:2]]
    else:
        results = list(forward_of(fa, case, *here[:3]))
        used = [] if case.kind == "no keys" else given_statistics(case, q, k, v, more)
        if used:
            on = [x.to(device) for x in used]
            results += backward_of(fa, case, here[3], *here[:3], *on)
    named = dict(zip(("o", "lse", "dq", "dk", "dv"), results, strict=False))
    layout = {name: (tuple(x.shape), str(x.dtype), x.stride()) for name, x in named.items()}
    return {name: x.cpu() for name, x in named.items()}, layout, used


def expected(case, used, recipe, device, change=lambda seen: seen):
    """(name, place, value, bound) of each result of each sequence, computed on a device."""
    q, k, v, dy, *_ = (x.to(device) for x in tensors(case))
    used = [x.to(device) for x in used]
    for number, (rows, columns) in enumerate(case.sequences()):
        one, keys, values = flat(q, case)[rows], flat(k, case)[columns], flat(v, case)[columns]
        seen = change(mask(case, len(one), len(keys))).to(device)
        shared = (seen, case.scale, case.dtype, recipe)
        found = forward(one, keys, values, *shared)
        if used:
            o, lse = used
            row = lse[:, rows] if case.packed else lse[number]
            given = (flat(dy, case)[rows], one, keys, values, flat(o, case)[rows], row)
            found |= backward(*given, *shared)
        places = {"o": rows, "dq": rows, "dk": columns, "dv": columns}
        places["lse"] = (slice(None), rows) if case.packed else number
        for name, (value, bound) in found.items():
            yield name, places[name], value, bound


def ratios(case, results, wanted):
    """The largest error of each result, in units of its bound."""
    worst = defaultdict(float)
    for name, place, value, bound in wanted:
        x = results[name] if name == "lse" else flat(results[name], case)
        got = x[place].to(value.device, torch.float64)
        if not got.numel():
            continue
        error = torch.where(got == value, 0.0, (got - value).abs() / bound)
        error = torch.where(error.isnan(), FAR, error).clamp(max=FAR)
        worst[name] = max(worst[name], error.max().item())
    return dict(worst)


def outside_untouched(case, results):
    """Whether rows of no sequence kept what the buffers held."""
    if not case.extra or "dq" not in results:
        return True
    return all((results[name][-case.extra :] == UNTOUCHED).all() for name in ("dq", "dk", "dv"))


def mask(case, queries, keys):
    return visible(queries, keys, case.causal, case.window, max(case.keys))


def any_row_with_two_keys(case):
    pairs = zip(case.queries, case.keys, strict=True)
    masks = [mask(case, n, m) for n, m in pairs]
    return any((seen.sum(1) > 1).any() for seen in masks)


def compared(case, standin, kernel, device):
    """One row of the report."""
    exact, layout, used = run(standin, case, "cpu")
    real, kernel_layout, kernel_used = run(kernel, case, device)
    row = {"case": case.name, "dtype": str(case.dtype).removeprefix("torch.")}
    row["layouts"] = layout == kernel_layout or [layout, kernel_layout]
    row["outside"] = outside_untouched(case, exact) and outside_untouched(case, real)
    row["standin"] = ratios(case, exact, expected(case, used, "exact", device))
    row["kernel"] = ratios(case, real, expected(case, kernel_used, "kernel", device))
    if any_row_with_two_keys(case):
        control = expected(case, kernel_used, "kernel", device, without_last_key)
        row["control"] = ratios(case, real, control)
    worst = [*row["standin"].values(), *row["kernel"].values()]
    found = max(row.get("control", {"": 2.0}).values()) > 1
    row["ok"] = row["layouts"] is True and row["outside"] and all(x <= 1 for x in worst) and found
    return row


def table(rows):
    """The worst ratio of each result, and how many controls it found, by dtype."""
    lines = [f"{'':18}" + "".join(f"{name:>9}" for name in ("o", "lse", "dq", "dk", "dv"))]
    for dtype in sorted({row["dtype"] for row in rows}):
        mine = [row for row in rows if row["dtype"] == dtype]
        for who in ("standin", "kernel"):
            worst = [
                max((row[who].get(name, 0.0) for row in mine), default=0.0)
                for name in ("o", "lse", "dq", "dk", "dv")
            ]
            lines.append(f"{dtype + ' ' + who:18}" + "".join(f"{x:9.3f}" for x in worst))
        tried = [row["control"] for row in mine if "control" in row]
        counts = [
            f"{sum(one.get(name, 0.0) > 1 for one in tried)}/{sum(name in one for one in tried)}"
            for name in ("o", "lse", "dq", "dk", "dv")
        ]
        lines.append(f"{dtype + ' control':18}" + "".join(f"{x:>9}" for x in counts))
    return "\n".join(lines)


def main():
    given, start = arguments(), time.monotonic()
    given.out.mkdir(parents=True, exist_ok=True)
    about = {"torch": torch.__version__}
    if given.device == "cuda":
        about["gpu"] = torch.cuda.get_device_name(0)
    standin = interface("flash_attn")
    kernel = interface("flash_attn[cuda]") if given.device == "cuda" else standin
    rows = []
    for case in cases():
        if given.only in case.name:
            row = compared(case, standin, kernel, given.device)
            rows.append(row)
            if not row["ok"]:
                print("DIFFERS", json.dumps(row), flush=True)
    passed = sum(row["ok"] for row in rows)
    about |= {"cases": len(rows), "passed": passed, "seconds": round(time.monotonic() - start)}
    (given.out / "flash_attn.json").write_text(json.dumps({"about": about, "rows": rows}) + "\n")
    print(json.dumps(about), table(rows), sep="\n", flush=True)
    return 0 if rows and passed == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
