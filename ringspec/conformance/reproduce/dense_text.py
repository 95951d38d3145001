"""The dense check of a reproducer: NumPy source that computes attention over all tokens at once, in float64.

Only the lines that the call needs are written. The source is plain arithmetic that a reader can check by hand; it
shares no code with ringspec. Before a reproducer is written, its numbers are compared with exact ones.
"""

from __future__ import annotations

from collections.abc import Iterator

from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.conventions import ORDERS
from ringspec.conformance.target.protocol import Call
from ringspec.errors import OptionError

TERMS = ("scale", "causal", "window", "softcap", "q_offset", "cu_seqlens", "cu_seqlens_k")
TENSORS = (
    "q", "k", "v", "dy", "dlse", "o", "lse", "sinks", "mask", "bias", "segments_q", "segments_k",
    "bound_min", "bound_max",
)  # fmt: skip
# Terms of schemes that only decide which rank holds which token; the tables of the call say it.
OF_TABLES = ("cu_seqlens_padded", "interleave")
COPIES = ("joint", "dcp")
RESULTS = ("o", "lse", "dq", "dk", "dv")


def check_known(call: Call, wrong: tuple[str, ...]) -> None:
    """Raise OptionError for a call that the dense check cannot compute."""
    unknown = [name for name in call.terms if name not in (*TERMS, *OF_TABLES)]
    if call.scheme in COPIES:
        unknown.append(f"the scheme {call.scheme}, whose ranks hold the same tokens")
    unknown += [name for name in call.tensors if name not in TENSORS]
    unknown += [f"the tensor {name}" for name in wrong[:1] if name not in RESULTS]
    if call.operation == "block" and "backward" in call.passes:
        unknown.append("the backward pass of a single block")
    if unknown:
        raise OptionError(
            "a call that the dense check of a reproducer can compute",
            f"a call with {', '.join(unknown)}",
            "use ringspec replay --shrink, or another case that fails",
        )


def back(axes: str) -> str:
    """Return the source that turns an array of the target into [B, H, n, d].

    >>> back("BHSD"), back("SHD")
    ('', '[None].transpose(0, 2, 1, 3)')
    """
    order = ORDERS[axes]
    turn = [order.index(axis) for axis in range(4)]
    batch = "" if "B" in axes else "[None]"
    return batch if turn == [0, 1, 2, 3] else f"{batch}.transpose{tuple(turn)}"


def is_masked(call: Call) -> bool:
    """Tell whether some query may not attend to some key, or a worker has padding."""
    tables = [call.index_q, call.index_k]
    padded = any(table is not None and (table < 0).any() for table in tables)
    masks = {"window", "cu_seqlens", "mask", "bias", "segments_q", "bound_min"}
    return padded or bool(call.terms.get("causal") or masks & {*call.terms, *call.tensors})


def dense_lines(call: Call, claims: Capabilities) -> Iterator[str]:
    """Yield the source of ``whole`` and ``dense``, which returns the results of all workers, one after another."""
    yield "def whole(xs):"
    yield '    """The arrays of all workers, one after another: [batch, heads, tokens, d] in float64."""'
    yield f"    return np.concatenate([np.float64(x){back(claims.axes)} for x in xs], axis=2)"
    yield ""
    yield ""
    backward = "backward" in call.passes
    names = ("q", "k", "v", "dy") if backward else ("q", "k", "v")
    yield "def dense():"
    yield '    """Attention over all tokens at once, in float64, from the definition."""'
    yield f"    Q, K, V{', DY' if backward else ''} = map(whole, ({', '.join(names)}))"
    axis = claims.axes.index("H")
    grouped = call.tensors["q"][0].shape[axis] != call.tensors["k"][0].shape[axis]
    if grouped:
        yield "    group = Q.shape[1] // K.shape[1]  # query heads for each key head"
        yield "    K, V = np.repeat(K, group, axis=1), np.repeat(V, group, axis=1)"
    yield f"    s = {call.terms['scale']!r} * Q @ K.swapaxes(2, 3)"
    if "bias" in call.tensors:
        yield "    s = s + rows(bias)"
    if "softcap" in call.terms:
        yield f"    tanh = np.tanh(s / {call.terms['softcap']!r})"
        yield f"    s = {call.terms['softcap']!r} * tanh"
    if is_masked(call):
        yield "    s = np.where(visible(), s, -np.inf)"
    yield from softmax(call)
    yield "    o = p @ V"
    base = " / np.log(2)" if claims.lse == "base2" else ""
    returned = f'"o": o, "lse": lse{base}'
    if backward:
        yield from gradients(call, "" if "B" in claims.axes else "[None]", grouped)
        returned += ', "dq": dq, "dk": dk, "dv": dv'
    yield f"    return {{{returned}}}"


def softmax(call: Call) -> Iterator[str]:
    """Yield the source of p and lse; a row without keys has p = 0 and lse = -inf."""
    sinks = "sinks" in call.tensors
    if not sinks and not is_masked(call):
        yield "    m = s.max(axis=3, keepdims=True)"
        yield "    total = np.exp(s - m).sum(axis=3, keepdims=True)"
        yield "    p, lse = np.exp(s - m) / total, (m + np.log(total))[..., 0]"
        return
    yield "    m = np.maximum(s.max(axis=3, keepdims=True), -1e300)"
    if sinks:
        yield "    sink = np.float64(sinks[0])[None, :, None, :]  # enters only the denominator"
        yield "    m = np.maximum(m, sink.max(axis=3, keepdims=True))"
    more = " + np.exp(sink - m).sum(axis=3, keepdims=True)" if sinks else ""
    yield f"    total = np.exp(s - m).sum(axis=3, keepdims=True){more}"
    yield "    p = np.exp(s - m) / np.where(total == 0, 1, total)"
    yield '    with np.errstate(divide="ignore"):'
    yield "        lse = (m + np.log(total))[..., 0]"


def gradients(call: Call, batch: str, grouped: bool) -> Iterator[str]:
    """Yield the source of dq, dk and dv.

    ``batch``: the source that adds the axis B to the rows of the target. ``grouped``: several query heads share a key.
    """
    yield "    delta = (DY * o).sum(axis=3, keepdims=True)"
    if "dlse" in call.tensors:
        rows = f"np.concatenate([np.float64(x){batch} for x in dlse], axis=2)"
        yield f"    delta = delta - {rows}[..., None]"
    yield "    ds = p * (DY @ V.swapaxes(2, 3) - delta)"
    if "softcap" in call.terms:
        yield "    ds = ds * (1 - tanh**2)"
    scale = repr(call.terms["scale"])
    yield f"    dq, dk, dv = {scale} * ds @ K, {scale} * ds.swapaxes(2, 3) @ Q, p.swapaxes(2, 3) @ DY"
    if grouped:
        shape = "x.reshape(len(x), -1, group, *x.shape[2:])"
        yield f"    dk, dv = ({shape}.sum(axis=2) for x in (dk, dv))"


def visible_lines(call: Call) -> Iterator[str]:
    """Yield the source of the function ``visible``: which query may attend to which key."""
    has = {*call.terms, *call.tensors}
    if has & {"bias", "mask"}:
        yield "def rows(pairs):"
        yield '    """The rows of all workers; the columns, which are in the order of tokens, in that of the workers."""'
        yield "    whole = pairs[0] if pairs[0].shape[2] == 1 else np.concatenate(pairs, axis=2)"
        yield "    return np.float64(whole if whole.shape[3] == 1 else whole[..., np.ravel(index_k)])"
        yield ""
        yield ""
    yield "def visible():"
    yield '    """True where a query may attend to a key, by their positions in the sequence."""'
    yield "    tq, tk = np.ravel(index_q), np.ravel(index_k)  # tokens; -1: padding"
    yield "    see = ((tq[:, None] >= 0) & (tk >= 0))[None, None]"
    if has & {"causal", "window", "bound_min"}:
        yield "    pq = np.concatenate(position_q, axis=1)[:, None, :, None]"
        yield "    pk = np.concatenate(position_k, axis=1)[:, None, None, :]"
    if call.terms.get("causal"):
        yield "    see = see & (pk <= pq)"
    left, right = call.terms.get("window") or (None, None)
    if left is not None:
        yield f"    see = see & (pk >= pq - {left})"
    if right is not None:
        yield f"    see = see & (pk <= pq + {right})"
    if "bound_min" in has:
        yield "    low, high = (np.concatenate(x, axis=1)[:, None, :, None] for x in (bound_min, bound_max))"
        yield "    see = see & (low <= pk) & (pk < high)"
    if "cu_seqlens" in has:
        starts = list(call.terms["cu_seqlens"])
        yield "    document = lambda t, cu: np.where(t < cu[-1], np.searchsorted(cu, t, 'right'), 0)"
        yield f"    of_q = document(tq, {starts})[:, None]"
        yield f"    of_k = document(tk, {list(call.terms.get('cu_seqlens_k') or starts)})"
        yield "    see = see & (of_q == of_k) & (of_q > 0) & (of_k > 0)"
    if "segments_q" in has:
        of_keys = "segments_k" if "segments_k" in has else "segments_q"
        yield f"    sq, sk = (np.concatenate(x, axis=1) for x in (segments_q, {of_keys}))"
        yield "    sq, sk = sq[:, None, :, None], sk[:, None, None, :]"
        yield "    see = see & (sq == sk) & (sq >= 0)"
    if "mask" in has:
        yield "    see = see & (rows(mask) > 0)"
    if "bias" in has:
        yield "    see = see & ~np.isneginf(rows(bias))"
    yield "    return see"
