"""Every case of ``core`` against every mutant: which cases kill which, and what rival rules let pass.

    python tests/benchmarks/kill_table.py --out kills.jsonl [--jobs 2] [--mutants ID ...] [--only ring/]
    python tests/benchmarks/kill_table.py --out long.jsonl --only plain --tokens 4096 --mutants ID ...
    python tests/benchmarks/kill_table.py --out kills.jsonl --table

The first form appends one line for each case and recipe to the file, and goes on where an earlier run
ended; the second prints the table as Markdown. Cases are worked off in their order, because those that
share a truth lie side by side. A mutant that applies to no call of a case is not run: its results are the
right ones.

Rival rules (``benchmarks.rivals``) see o, dq, dk and dv of the golden ring cases, and of a plain
random problem in three layouts, gathered over all workers, rounded to their format. Rules that need a naive
implementation have none for sinks, soft cap, bias, dropout and empty rows, and say nothing there.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

from benchmarks.rivals import RULES, Seen  # noqa: E402
from benchmarks.rivals_naive import naive_of, sizes  # noqa: E402

from ringspec.conformance.cases.calls import call_of  # noqa: E402
from ringspec.conformance.cases.model import RunCase  # noqa: E402
from ringspec.conformance.cases.problems import dealt, drawn  # noqa: E402
from ringspec.conformance.cases.profiles import run_cases  # noqa: E402
from ringspec.conformance.diagnose.mutants import (  # noqa: E402
    MODULES,
    MUTANTS,
    Mutant,
    MutantTarget,
    precision_bugs,
)
from ringspec.conformance.diagnose.mutants.mutant import mutant  # noqa: E402
from ringspec.conformance.judge import noise as noise_judge  # noqa: E402
from ringspec.conformance.judge.noise_inputs import question_of  # noqa: E402
from ringspec.conformance.run.case import run_case  # noqa: E402
from ringspec.conformance.target.protocol import Call  # noqa: E402
from ringspec.conformance.target.results import due_of  # noqa: E402
from ringspec.conformance.targets.reference import REFERENCES  # noqa: E402
from ringspec.formats import load  # noqa: E402
from ringspec.rings.layouts import unshard  # noqa: E402
from ringspec.spec.layout import Layout  # noqa: E402
from ringspec.vectors import open_set  # noqa: E402

RECIPES = ("bf16", "float32")
DTYPES = {"bf16": "bf16", "float32": "f32"}
TOGETHER = 8  # neighbouring cases in one process
PRECISION = {one.id for one in precision_bugs.BUGS}
WITHOUT_NAIVE = ("max-1e-2", "max-2e-2", "assert_close")
TENSORS = ("o", "dq", "dk", "dv")
RIGHT = mutant("right", "", "", applies=lambda call: True)
PLAIN_LAYOUTS, PLAIN_TOKENS = ("contiguous", "striped", "zigzag"), 512


@lru_cache(maxsize=1)
def cases() -> dict[str, RunCase]:
    return {case.id: case for case in run_cases("core")}


def claimed(recipe: str) -> list[str]:
    claims = REFERENCES[recipe].capabilities
    return [id for id, case in cases().items() if case.why_not(claims) is None]


def killed(recipe: str, id: str, mutants: list[str]) -> dict[str, Any]:
    """One case against all mutants that apply to one of its calls."""
    case, started = cases()[id], time.perf_counter()
    calls = case.make(REFERENCES[recipe].capabilities)
    applied, kills = [], {}
    if id.startswith("noise/"):  # seconds each, and other cases kill the other mutants
        noise_judge.inferred = lambda *given: ()  # most of those seconds, and not asked here
        mutants = [name for name in mutants if name in PRECISION]
    for name in mutants:
        if not any(MUTANTS[name].applies(call) for call in calls):
            continue
        applied.append(name)
        record = run_case(MutantTarget(MUTANTS[name], recipe), case)
        if record.outcome != "pass":
            kinds = sorted({f"{f.tensor} {f.kind}" for f in record.findings if f.kind != "ok"})
            kills[name] = {"outcome": record.outcome, "kinds": kinds or [record.message[:80]]}
    seconds = round(time.perf_counter() - started, 3)
    return {"what": "case", "recipe": recipe, "id": id, "applied": applied, "kills": kills,
            "seconds": seconds}  # fmt: skip


def plain_call(recipe: str, layout: str, tokens: int) -> Call:
    """A causal problem of two heads, D = 64, over four workers."""
    problem = drawn("kill-table-plain", DTYPES[recipe], S=tokens, causal=True)
    case = dealt(problem, f"plain/{layout}-w4", 4, layout)
    return call_of(case, {})


def ring_call(recipe: str, id: str) -> Call | None:
    """The golden case of that id, where the recipe claims it whole."""
    core = open_set("core")
    case = core.case(id)
    whole = case.operation == "ring" and case.passes == ("forward", "backward")
    if not whole or cases()[id].why_not(REFERENCES[recipe].capabilities) is not None:
        return None
    return call_of(case, core.tensors(id))


def rivals(recipe: str, id: str, mutants: list[str]) -> dict[str, Any]:
    """Which rules pass which mutants on a call; 'right' among them, which a good rule passes."""
    started = time.perf_counter()
    kind, *rest = id.split(" ")
    call = plain_call(recipe, rest[0], int(rest[1])) if kind == "plain" else ring_call(recipe, id)
    passes: dict[str, list[str]] = {rule.name: [] for rule in RULES}
    applied: list[str] = []
    if call is not None:
        question = question_of(call)
        naive = naive_results(call, question)
        for one in (RIGHT, *(MUTANTS[name] for name in mutants)):
            if not one.applies(call):
                continue
            applied.append(one.id)
            got = gathered(call, one, recipe)
            for rule in RULES:
                if rule.name not in WITHOUT_NAIVE and naive is None:
                    continue
                if all(rule.passes(seen(call, question.truth, naive, got, t)) for t in TENSORS):
                    passes[rule.name].append(one.id)
        if naive is None:
            passes = {rule: found for rule, found in passes.items() if rule in WITHOUT_NAIVE}
    seconds = round(time.perf_counter() - started, 3)
    return {"what": "rivals", "recipe": recipe, "id": id, "applied": applied, "passes": passes,
            "seconds": seconds}  # fmt: skip


@dataclass(frozen=True)
class Naive:
    """What rules compare with: a naive implementation, the same of perturbed inputs, sizes of products."""

    results: dict[str, np.ndarray]
    perturbed: dict[str, np.ndarray]
    sizes: dict[str, tuple[np.ndarray, int]]


def naive_results(call: Call, question: Any) -> Naive | None:
    attention = question.attention
    odd = (attention.keep, attention.softcap, attention.sinks, attention.bias)
    other = any(x is not None for x in odd) or "dlse" in call.tensors
    if other or not np.isfinite(attention.lse).all():
        return None
    format = call.formats["outputs"]
    return Naive(naive_of(attention, format), naive_of(attention, format, 0), sizes(attention))


def gathered(call: Call, one: Mutant, recipe: str) -> dict[str, np.ndarray]:
    """o, dq, dk, dv of a mutant in global order."""
    result = MutantTarget(one, recipe).run(call)
    tables = {name: call.index_k if name in ("dk", "dv") else call.index_q for name in TENSORS}
    return {
        name: unshard([load(x) for x in getattr(result, name)], Layout("table", tables[name]))
        for name in TENSORS
        if name in due_of(call)
    }


def seen(call: Call, truth: Any, naive: Naive | None, got: Any, name: str) -> Seen:
    right, format = truth[name], call.formats["outputs"]
    if naive is None:
        return Seen(got[name], right, right, right, np.zeros(right.shape), 1, format)
    size, length = naive.sizes[name]
    return Seen(got[name], right, naive.results[name], naive.perturbed[name], size, length, format)


def work(tasks: list[tuple[str, str, str]], mutants: list[str]) -> list[dict[str, Any]]:
    run = {"case": killed, "rivals": rivals}
    with np.errstate(all="ignore"):
        return [run[what](recipe, id, mutants) for what, recipe, id in tasks]


def tasks_left(lines: list[dict[str, Any]], tokens: int) -> Iterator[tuple[str, str, str]]:
    done = {(line["what"], line["recipe"], line["id"]) for line in lines}
    for recipe in RECIPES:
        ids = claimed(recipe)
        rings = [id for id in ids if id.startswith("ring/")]
        plain = [f"plain {layout} {tokens}" for layout in PLAIN_LAYOUTS]
        for what, chosen in (("rivals", [*rings, *plain]), ("case", ids)):
            yield from ((what, recipe, id) for id in chosen if (what, recipe, id) not in done)


def read(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; what an interrupted run has half written is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def fill(path: Path, jobs: int, mutants: list[str], cases_like: str, tokens: int) -> None:
    """Append what is missing, a few neighbouring cases at a time."""
    lines = read(path)
    if not lines:
        path.write_text(
            json.dumps({"what": "head", "recipe": "", "id": "", "mutants": mutants}) + "\n"
        )
        lines = read(path)
    if lines[0]["mutants"] != mutants:
        raise SystemExit(f"{path} is of other mutants: give another file")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    left = [task for task in tasks_left(lines, tokens) if task[2].startswith(cases_like)]
    parts = [[task] for task in left if task[2].startswith("plain")]
    small = [task for task in left if not task[2].startswith("plain")]
    parts += [small[i : i + TOGETHER] for i in range(0, len(small), TOGETHER)]
    started = time.perf_counter()
    with ProcessPoolExecutor(jobs) as pool, path.open("a", encoding="utf-8") as file:
        for n, future in enumerate(as_completed([pool.submit(work, p, mutants) for p in parts]), 1):
            for line in future.result():
                file.write(json.dumps(line) + "\n")
            file.flush()
            minutes = (time.perf_counter() - started) / 60
            print(f"{n} of {len(parts)} parts, {minutes:.1f} min", flush=True)


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown: a line for each mutant and recipe, folded by family, after those for the correct program."""
    parts = [family_table(lines, ["right"])]
    for module in MODULES:
        names = [one.id for one in module.BUGS if one.id in lines[0]["mutants"]]
        if names:
            family = module.__name__.rpartition(".")[2].removesuffix("_bugs")
            count = "1 bug" if len(names) == 1 else f"{len(names)} bugs"
            summary = f'<details class="browse"><summary>{family}: {count}</summary>'
            parts += [summary, family_table(lines, names), "</details>"]
    seconds = sum(line.get("seconds", 0.0) for line in lines)
    parts.append("Of a rule: on how many of the ring problems to which the bug applies it passes the bug "
                 f"(of the correct program: on how many it passes). {seconds / 60:.0f} minutes of one core.")  # fmt: skip
    return "\n\n".join(parts)


def family_table(lines: list[dict[str, Any]], names: list[str]) -> str:
    """The lines of these mutants: for each, one for each recipe."""
    rules = [rule.name for rule in RULES]
    rows = [f"| mutant | recipe | cases that kill it | first | {' | '.join(rules)} |"]
    rows.append("|" + " --- |" * (4 + len(rules)))
    order = {id: n for n, id in enumerate(cases())}
    for name, recipe in product(names, RECIPES):
        ran = [line for line in lines if line["recipe"] == recipe and line["what"] == "case"]
        ran.sort(key=lambda line: order.get(line["id"], 0))
        beside = [line for line in lines if line["recipe"] == recipe and line["what"] == "rivals"]
        killing = [line for line in ran if name in line["kills"]]
        of = sum(name in line["applied"] for line in ran)
        first = f"`{killing[0]['id']}`" if killing else "none"
        cells = [missed(beside, name, rule) for rule in rules]
        count = "" if name == "right" else f"{len(killing)} of {of}"
        rows.append(f"| {name} | {recipe} | {count} | {first} | {' | '.join(cells)} |")
    return "\n".join(rows)


def missed(beside: list[dict[str, Any]], name: str, rule: str) -> str:
    """'3 of 20': the rule passed the mutant on 3 of the 20 problems to which both apply."""
    seen_on = [line for line in beside if name in line["applied"] and rule in line["passes"]]
    passed = sum(name in line["passes"][rule] for line in seen_on)
    return f"{passed} of {len(seen_on)}" if seen_on else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--mutants", nargs="*", default=list(MUTANTS), choices=list(MUTANTS))
    parser.add_argument("--only", default="", help="cases whose id begins so")
    parser.add_argument("--tokens", type=int, default=PLAIN_TOKENS, help="of the plain problem")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if not given.table:
        fill(given.out, given.jobs, given.mutants, given.only, given.tokens)
    print(table(read(given.out)))


if __name__ == "__main__":
    main()
