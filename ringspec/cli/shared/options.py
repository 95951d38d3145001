"""The options that simulate and schedule share, and their translation to keywords of ringspec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from ringspec.cli.shared.inputs import Shape
from ringspec.errors import OptionError
from ringspec.problem.checks import check_workers
from ringspec.recipes import RECIPES
from ringspec.spec.layout import LAYOUTS
from ringspec.spec.schedule import CIRCULATIONS

TOKENS_PER_WORKER = 16
MAX_WORKERS = 1024
MAX_LENGTH = 1 << 40
SHAPE_OPTIONS = ("length", "kv_length", "batch", "heads", "kv_heads", "head_dim", "value_dim")
Function = TypeVar("Function", bound=Callable[..., Any])


class WindowType(click.ParamType):
    """The type of a window option: ``L,R``, or one number for both sides. ``none`` leaves a side unbounded."""

    name = "window"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not isinstance(value, str):
            return value
        sides = [side.strip().lower() for side in value.split(",")]
        try:
            numbers = [None if side == "none" else int(side) for side in sides]
        except ValueError:
            numbers = []
        if len(numbers) not in (1, 2):
            self.fail(f"{value!r} is not a window: write 8, or 8,0, or 8,none", param, ctx)
        return tuple(numbers if len(numbers) == 2 else numbers * 2)


class LengthsType(click.ParamType):
    """The type of an option that takes whole numbers separated by commas; ``64k`` is 65536, ``1M`` is 1048576."""

    name = "lengths"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            lengths = tuple(whole_number(part) for part in value.split(","))
        except ValueError:
            lengths = (-1,)
        if min(lengths) < 0:
            self.fail(
                f"{value!r} is not a list of whole numbers: write 5,3,8, or 64k for 65536, 1M for 1048576",
                param,
                ctx,
            )
        return lengths


def whole_number(text: str) -> int:
    """Return a number that may end in k (1024) or M (1048576); ValueError if there is none.

    >>> whole_number("64k"), whole_number("1M"), whole_number("12")
    (65536, 1048576, 12)
    """
    unit = {"k": 1 << 10, "m": 1 << 20}.get(text.strip()[-1:].lower())
    return int(text) if unit is None else int(text.strip()[:-1]) * unit


class NamesType(click.ParamType):
    """The type of an option that takes names separated by commas."""

    name = "names"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return tuple(value.split(",")) if isinstance(value, str) else value


class MeshType(click.ParamType):
    """The type of an option that takes axes with their sizes."""

    name = "mesh"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not isinstance(value, str):
            return value
        axes = [part.partition("=") for part in value.split(",")]
        if not all(size.isascii() and size.isdigit() and int(size[:9]) for _, _, size in axes):
            self.fail(
                f"{value!r} is not a mesh: write axes and sizes above 0, such as ring=2,ulysses=4",
                param,
                ctx,
            )
        return tuple((axis, int(size[:9])) for axis, _, size in axes)


def choice(names: Any) -> str:
    return "[" + "|".join(names) + "]"


PROBLEM = (
    click.option(
        "--workers",
        default=4,
        show_default=True,
        metavar="N",
        help="W, the number of workers in the ring.",
    ),
    click.option(
        "--length",
        type=int,
        metavar="N",
        help=f"Sq, the number of queries. [default: {TOKENS_PER_WORKER} per worker]",
    ),
    click.option(
        "--kv-length", type=int, metavar="N", help="Sk, the number of keys. [default: --length]"
    ),
    click.option(
        "--batch", type=int, default=1, show_default=True, metavar="N", help="B, the batch size."
    ),
    click.option(
        "--heads",
        type=int,
        metavar="N",
        default=2,
        show_default=True,
        help="H, the number of query heads.",
    ),
    click.option(
        "--kv-heads",
        type=int,
        metavar="N",
        help="Hkv, the number of key/value heads; divides --heads. [default: --heads]",
    ),
    click.option(
        "--head-dim",
        type=int,
        metavar="N",
        default=16,
        show_default=True,
        help="D, the head dimension of q and k.",
    ),
    click.option(
        "--value-dim",
        type=int,
        metavar="N",
        help="Dv, the head dimension of v. [default: --head-dim]",
    ),
    click.option(
        "--layout",
        default="contiguous",
        show_default=True,
        metavar=choice(LAYOUTS),
        help="Which worker holds which tokens.",
    ),
    click.option(
        "--circulation",
        default="kv",
        show_default=True,
        metavar=choice(CIRCULATIONS),
        help="What travels. kv: keys and values; q: queries, in the backward pass only; gather: all keys and "
        "values, in one step.",
    ),
    click.option(
        "--direction",
        type=int,
        default=1,
        show_default=True,
        metavar="[1|-1]",
        help="1: worker r sends to r + 1; -1: to r - 1.",
    ),
    click.option(
        "--causal/--no-causal",
        default=True,
        show_default=True,
        help="A query attends to keys at or before its own position.",
    ),
    click.option(
        "--window",
        type=WindowType(),
        metavar="L,R",
        help="Sliding window: at most L positions earlier and R later. One number sets both sides; 'none' is "
        "unbounded.",
    ),
    click.option(
        "--documents",
        type=LengthsType(),
        metavar="N,N,...",
        help="Lengths of packed documents, such as 5,3 or 64k; tokens after the last one are padding.",
    ),
    click.option(
        "--kv-documents",
        type=LengthsType(),
        metavar="N,N,...",
        help="Lengths of the documents among the keys. [default: --documents]",
    ),
    click.option(
        "--q-offset",
        type=int,
        default=0,
        metavar="N",
        show_default=True,
        help="Position of query 0. Sk - Sq aligns the last query with the last key.",
    ),
    click.option(
        "--recipe",
        default="float64",
        show_default=True,
        metavar="NAME",
        help=f"Number formats and rounding points; they determine how many bytes travel. One of "
        f"{', '.join(RECIPES)}.",
    ),
    click.option(
        "--skip-masked",
        is_flag=True,
        help="Do not compute pairs of blocks in which no pair of tokens is visible.",
    ),
    click.option(
        "--backward/--no-backward",
        default=True,
        show_default=True,
        help="Run the backward pass after the forward pass.",
    ),
)


def problem_options(function: Function) -> Function:
    """Add all options of :data:`PROBLEM` to a command, in the same order."""
    for option in reversed(PROBLEM):
        function = option(function)
    return function


def some_problem_options(*left_out: str) -> Callable[[Function], Function]:
    """Return a decorator that adds the options of :data:`PROBLEM`, except those ``left_out``, to a command."""

    def decorate(function: Function) -> Function:
        function = problem_options(function)
        # click keeps the options of a function in this list until a command is made of the function.
        kept = [one for one in function.__click_params__ if one.name not in left_out]  # type: ignore[attr-defined]
        function.__click_params__ = kept  # type: ignore[attr-defined]
        return function

    return decorate


@dataclass(frozen=True)
class Request:
    """The ring that the user requests; ``options`` are keywords of :class:`~ringspec.problem.options.Options`."""

    shape: Shape
    workers: int
    layout: str
    circulation: str
    direction: int
    recipe: str
    skip_masked: bool
    backward: bool
    options: dict[str, Any]


def request_from(given: dict[str, Any]) -> Request:
    """Return the ring that the options of :data:`PROBLEM` request; fill in defaults that depend on other options."""
    workers = check_workers(given["workers"])
    if workers > MAX_WORKERS:
        raise OptionError(
            f"at most {MAX_WORKERS} workers on the command line",
            f"{workers}",
            "choose fewer workers; ringspec.ring accepts any number",
        )
    for name in SHAPE_OPTIONS:
        in_range(given[name], name, 1)
    in_range(given["q_offset"], "q_offset", -MAX_LENGTH)
    length = given["length"] or sum(given["documents"] or ()) or TOKENS_PER_WORKER * workers
    kv_length = given["kv_length"] or sum(given["kv_documents"] or ()) or length
    shape = Shape(
        batch=given["batch"],
        heads=given["heads"],
        kv_heads=given["kv_heads"] or given["heads"],
        length=length,
        kv_length=kv_length,
        head_dim=given["head_dim"],
        value_dim=given["value_dim"] or given["head_dim"],
    )
    options = {
        "causal": given["causal"],
        "window": given["window"],
        "q_offset": given["q_offset"],
        "cu_seqlens": starts(given["documents"]),
        "cu_seqlens_k": starts(given["kv_documents"]),
    }
    return Request(
        shape,
        workers,
        given["layout"],
        given["circulation"],
        given["direction"],
        given["recipe"],
        given["skip_masked"],
        given["backward"],
        options,
    )


def in_range(value: int | None, name: str, least: int, most: int = MAX_LENGTH) -> None:
    """Raise OptionError unless ``least`` <= ``value`` <= ``most``; ``name`` is the option named in the message."""
    if value is not None and not least <= value <= most:
        option = "--" + name.replace("_", "-")
        raise OptionError(
            f"{option} from {least} to {most}", str(value), f"give {option} a number in that range"
        )


def starts(lengths: tuple[int, ...] | None) -> list[int] | None:
    """Convert document lengths to ``cu_seqlens``.

    >>> starts((5, 3, 8))
    [0, 5, 8, 16]
    """
    if lengths is None:
        return None
    total = [0]
    for length in lengths:
        total.append(total[-1] + length)
    return total
