"""The part of a reproducer that starts the ranks of a PyTorch function under gloo and collects their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ringspec.conformance.adapters.torch_worker import LEAVES, SEEDS, plain_fields
from ringspec.conformance.reproduce.literals import source, wrapped
from ringspec.conformance.target.protocol import Call


def torch_lines(
    name: str, call: Call, options: Mapping[str, Any], tables: Sequence[str]
) -> Iterator[str]:
    """Yield the source of ``one_rank``, which runs in a process of its own, and of ``results``.

    ``tables``: the tables of tokens and positions that the function under test uses.
    """
    backward = "backward" in call.passes
    further = [n for n in call.tensors if n not in ("q", "k", "v", *SEEDS)]
    leaves = [n for n in LEAVES if n in call.tensors]
    yield "def tensor(x):"
    yield "    wide = torch.from_numpy(np.float32(x)) if x.dtype.name == 'bfloat16' else torch.from_numpy(x.copy())"
    yield "    return wide.bfloat16() if x.dtype.name == 'bfloat16' else wide"
    yield ""
    yield ""
    yield "def one_rank(rank, folder):"
    yield f"    dist.init_process_group('gloo', init_method=f'file://{{folder}}/rendezvous', rank=rank, world_size={call.workers})"
    given = [*dict.fromkeys([*leaves, *further])]
    yield f"    given = {{n: tensor(globals()[n][rank]).requires_grad_({backward} and n in {tuple(leaves)}) for n in {tuple(given)}}}"
    yield from (f"    {line}" for line in wrapped(f"call = {local_text(call, further, tables)}"))
    words = "".join(f", {key}={source(value, call)}" for key, value in options.items())
    yield f"    found = {name}(given['q'], given['k'], given['v'], group=dist.group.WORLD, call=call{words})"
    yield "    o, lse = found if isinstance(found, (tuple, list)) else (found, None)"
    yield "    results = {'o': o} if lse is None else {'o': o, 'lse': lse}"
    if backward:
        if "dlse" in call.tensors:
            yield "    torch.autograd.backward([o, lse], [tensor(dy[rank]), tensor(dlse[rank])])"
        else:
            yield "    o.backward(tensor(dy[rank]))"
        yield f"    results.update({{'d' + n: given[n].grad for n in {tuple(leaves)} if given[n].grad is not None}})"
    yield "    torch.save({n: x.detach().double() for n, x in results.items()}, f'{folder}/{rank}.pt')"
    yield "    dist.destroy_process_group()"
    yield ""
    yield ""
    yield "def results():"
    yield "    with tempfile.TemporaryDirectory() as folder:"
    yield f"        torch.multiprocessing.spawn(one_rank, args=(folder,), nprocs={call.workers})"
    yield f"        ranks = [torch.load(f'{{folder}}/{{rank}}.pt') for rank in range({call.workers})]"
    yield "    return {name: [one[name].numpy() for one in ranks] for name in ranks[0]}"


def local_text(call: Call, further: list[str], tables: Sequence[str]) -> str:
    """Write the LocalCall of a rank as a SimpleNamespace with the same fields and properties."""
    plain = {name: source(getattr(call, name), call) for name in sorted(plain_fields())}
    plain |= {"rank": "rank", "causal": repr(bool(call.terms.get("causal", False)))}
    plain |= {"scale": repr(float(call.terms["scale"]))} if "scale" in call.terms else {}
    plain |= {"tensors": f"{{{', '.join(f'{n!r}: given[{n!r}]' for n in further)}}}"}
    if call.scheme:
        axes, sizes = zip(*call.mesh, strict=True)
        plain |= {name: repr(getattr(call, name)) for name in ("scheme", "mesh")}
        plain["device_mesh"] = f"dist.init_device_mesh('cpu', {sizes}, mesh_dim_names={axes})"
    plain |= {name: f"tensor({name}[rank])" for name in tables if getattr(call, name) is not None}
    return f"SimpleNamespace({', '.join(f'{name}={text}' for name, text in plain.items())})"
