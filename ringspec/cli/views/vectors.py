"""One golden case as plain data (for --json) and as lines of text."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.tensorfile import dtype_code
from ringspec.vectors.format.case import Case, Ring, SchemeCall
from ringspec.vectors.format.case_json import case_to_data
from ringspec.vectors.format.digest import tensor_digest
from ringspec.vectors.format.flag import Flag
from ringspec.vectors.format.tensor_table import whole_tensors

Tensors = dict[str, NDArray]
MOST_VALUES = 6


def terms_text(case: Case) -> str:
    """Describe the ring, the mask and the other options of a case in a few words.

    >>> from ringspec.vectors.catalogue import catalogue
    >>> [first] = [case for case in catalogue("core") if case.id == "ring/window-causal-w4"]
    >>> terms_text(first)
    'W4 contiguous causal window 6,0'
    """
    words = [] if case.ring is None else [ring_text(case.ring)]
    words += [] if case.scheme is None else [scheme_text(case.scheme)]
    for name, value in case.terms.items():
        if name == "causal":
            words.append("causal")
        elif name == "window":
            words.append("window " + ",".join("-" if side is None else str(side) for side in value))
        elif name in ("cu_seqlens", "cu_seqlens_k"):
            words.append(f"{name} " + ",".join(map(str, value)))
        elif name == "empty_lse":
            words.append(f"empty parts have lse {value}")
        elif name != "scale":
            words.append(f"{name.replace('_', '-')} {value:g}" if name != "dropout_seed" else "")
    usual = {"q", "k", "v", "dy", "parts_o", "parts_lse", "lse", "delta"}
    words += [name for name in case.inputs.tensors if name not in usual]
    return " ".join(word for word in words if word)


def ring_text(ring: Ring) -> str:
    words = [f"W{ring.workers}", ring.layout]
    words += [] if ring.circulation == "kv" else [f"circulation {ring.circulation}"]
    words += [] if ring.direction == 1 else [f"direction {ring.direction}"]
    return " ".join(words)


def scheme_text(call: SchemeCall) -> str:
    """Describe how a case is split over ranks.

    >>> scheme_text(SchemeCall("usp", (("ring", 2), ("ulysses", 2)), "zigzag"))
    'usp ring 2 x ulysses 2 zigzag'
    """
    words = [call.name, " x ".join(f"{name} {size}" for name, size in call.mesh), call.layout or ""]
    words += [] if call.circulation is None else [f"circulation {call.circulation}"]
    words += [] if call.direction is None else [f"direction {call.direction}"]
    if call.text is not None:
        words.append("text " + ",".join(map(str, call.text)) + f" {call.text_at or 'front'}")
    words += [] if call.interleave is None else [f"interleave {call.interleave}"]
    if call.cu_seqlens_padded is not None:
        words.append("cu_seqlens_padded " + ",".join(map(str, call.cu_seqlens_padded)))
    return " ".join(word for word in words if word)


def shape_text(case: Case) -> str:
    """Format the sizes of a case: B, heads H/Hkv, lengths Sq x Sk, widths D/Dv. Two equal numbers are written once.

    >>> from ringspec.vectors.catalogue import catalogue
    >>> [first] = [case for case in catalogue("core") if case.id == "ring/contiguous-end-aligned-w2"]
    >>> shape_text(first)
    'B1 H2 S8x16 D4'
    """
    if case.shape is None:
        return ""
    s = case.shape
    heads = f"{s.H}" if s.H == s.Hkv else f"{s.H}/{s.Hkv}"
    lengths = f"{s.Sq}" if s.Sq == s.Sk else f"{s.Sq}x{s.Sk}"
    widths = f"{s.D}" if s.D == s.Dv else f"{s.D}/{s.Dv}"
    return f"B{s.B} H{heads} S{lengths} D{widths}"


def case_data(case: Case, stored: Tensors, content: str, values: bool) -> dict[str, Any]:
    """Return a case as plain data: the content of case.json, the digest of the case, and a list of its tensors.

    ``values``: whether to include the numbers of stored tensors.
    """
    rows = []
    for row in tensor_rows(case, stored):
        entry = {name: row[name] for name in ("name", "dtype", "shape", "stored", "sha256")}
        if values and row["name"] in stored:
            entry["values"] = listed(stored[row["name"]])
        rows.append(entry)
    return {"case": case_to_data(case), "content": content, "tensors": rows}


def case_lines(case: Case, flags: list[Flag]) -> list[str]:
    """Return everything about a case except its tensors, as lines."""
    lines = [case.id, case.reason]
    if case.withdrawn is not None:
        lines.append(f"withdrawn since {case.withdrawn.since}: {case.withdrawn.reason}")
    lines += ["", f"operation  {case.operation}, {' and '.join(case.passes)}"]
    if case.shape is not None:
        sizes = " ".join(f"{name}={length}" for name, length in vars(case.shape).items())
        lines.append(f"shape      {sizes}")
    if case.formats is not None:
        formats = ", ".join(f"{name} {format}" for name, format in vars(case.formats).items())
        lines.append(f"formats    {formats}")
    terms = terms_text(case)
    scale = f"scale {case.terms['scale']!r}" if "scale" in case.terms else ""
    lines.append(f"terms      {', '.join(part for part in (scale, terms) if part) or 'none'}")
    lines.append(f"rules      {' '.join(case.rules)}")
    if case.recipes:
        lines.append(f"recipes    {' '.join(case.recipes)}")
    needs = [f"{name} {listed_words(value)}" for name, value in case.requires.items()]
    lines.append(f"requires   {'; '.join(needs)}")
    lines += ["", "finds these bugs:" if flags else "finds no known bug"]
    for flag in flags:
        lines.append(f"{flag.name} ({flag.bug_class}): {flag.effect}")
        pairs = zip(flag.reports, flag.statuses, strict=True)
        lines += [f"  {report} ({status})" for report, status in pairs]
    return lines


def listed_words(value: Any) -> str:
    """Format a value: a tuple with commas, and True and False as in JSON.

    >>> listed_words(("a", "b")), listed_words(()), listed_words(True)
    ('a,b', '-', 'true')
    """
    if isinstance(value, tuple):
        return ",".join(map(listed_words, value)) or "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


def tensor_rows(case: Case, stored: Tensors) -> list[dict[str, Any]]:
    """List the tensors of a case by name, including those whose values are not stored.

    ``sha256`` is the digest of the whole tensor, even if only some of its rows are stored.
    """
    table = whole_tensors(case)
    rows = []
    for name in sorted({*stored, *case.digests}):
        x, pinned = stored.get(name), case.digests.get(name)
        shape = list(table[name].axes if x is None else x.shape)
        kept = "no" if x is None else "whole"
        if x is not None and pinned is not None and tensor_digest(x) != pinned:
            kept = "rows"
        rows.append(
            {
                "name": name,
                "dtype": table[name].code if x is None else dtype_code(x.dtype),
                "shape": shape,
                "shape_text": "[" + ", ".join(map(str, shape)) + "]",
                "stored": kept,
                "sha256": pinned or ("" if x is None else tensor_digest(x)),
            }
        )
    return rows


def values_text(x: NDArray) -> str:
    """Format the first values in C order and the last value.

    >>> values_text(np.arange(20.0)), values_text(np.array([True, False]))
    ('0.0 1.0 2.0 3.0 4.0 5.0 ... 19.0', 'True False')
    """
    flat = x.ravel()
    if flat.size <= MOST_VALUES + 1:
        return " ".join(map(str, listed(flat)))
    first, last = listed(flat[:MOST_VALUES]), listed(flat[-1:])
    return " ".join(map(str, [*first, "...", *last]))


def listed(x: NDArray) -> Any:
    """Return all values as nested lists; infinities become strings when the document is printed."""
    return (x.astype(np.float64) if x.dtype.kind in "fV" else x).tolist()
