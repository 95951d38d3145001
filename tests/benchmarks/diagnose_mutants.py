"""How often the diagnosis names ringspec's own mutants: every one, over several cases, in two recipes.

    python tests/benchmarks/diagnose_mutants.py --out named.jsonl [--jobs 16] [--mutants ID ...]
    python tests/benchmarks/diagnose_mutants.py --out named.jsonl --table

Each mutant is run as a target, in a recipe, over the case that it is known to fail and over golden cases to
which it applies, rings first, until six failures are diagnosed. It is run as two kernels: ``same`` is the
program with which a diagnosis compares, bit for bit; ``other`` has tiles of 6 queries and 5 keys and merges
normalised parts, of which its recipe says nothing. ``right`` is the program without a bug.

Each is also read as ``ringspec explain`` does it: ``explained`` says whether its sentences account for every number of
the readouts that fail.

Of a case the name is ``right``, or of the same ``class`` (the results of both mutants coincide on the case
within rounding, by tests/conformance/diagnose/same_results.py), or ``wrong``, or ``none``. Of a run it is right
where the verdict is the mutant or a mutant of its class on every diagnosed case that the verdict's bug applies
to. One line of JSON for each mutant, recipe and kernel is appended to the file, which an interrupted run goes on
with. Each is a process of its own, and ends with ``crash`` or ``timeout`` where it must.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

for threads in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(threads, "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conformance.diagnose.same_results import coincide  # noqa: E402

from ringspec.conformance.cases.model import RunCase  # noqa: E402
from ringspec.conformance.cases.profiles import run_cases  # noqa: E402
from ringspec.conformance.diagnose.mutants import MUTANTS, Mutant, MutantTarget, run_mutant  # noqa: E402
from ringspec.conformance.diagnose.mutants.mutant import RECIPES, mutant  # noqa: E402
from ringspec.conformance.diagnose.summary import Diagnoser, most_likely  # noqa: E402
from ringspec.conformance.explain.explain import explain_target  # noqa: E402
from ringspec.conformance.judge.recipe import recipe_for  # noqa: E402
from ringspec.conformance.run.case import run_case  # noqa: E402
from ringspec.conformance.target.declared import base_recipe  # noqa: E402
from ringspec.conformance.target.protocol import Call, Result  # noqa: E402
from ringspec.conformance.target.results import due_of  # noqa: E402
from ringspec.formats import store  # noqa: E402

RIGHT = mutant("right", "", "", applies=lambda call: True)
KERNELS = {"same": {}, "other": {"tile_q": 6, "tile_k": 5, "merge_order": "normalised"}}
KINDS = ("ring/", "adversarial/", "attention/", "block/", "merge/", "number/", "noise/")
RIGHT_NAMES = ("right", "class")
BROKEN = ("crash", "timeout", "error")  # these are run again


class Kernel(MutantTarget):
    """A mutant whose recipe has some points more than it declares."""

    def __init__(self, mutant: Mutant, recipe: str, changes: dict[str, Any]) -> None:
        super().__init__(mutant, recipe)
        self.changes = changes

    def run(self, call: Call) -> Result:
        recipe = base_recipe(self.capabilities.recipe, call.formats["inputs"]).replace(
            **self.changes
        )
        results = run_mutant(self.mutant, call, recipe)
        due = due_of(call)
        return Result(**{name: [store(x, due[name].format) for x in results[name]] for name in due})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--mutants", nargs="*", help="ids; 'right' is the control")
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--kernels", nargs="*", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--enough", type=int, default=6, help="diagnosed failures of a run")
    parser.add_argument("--most", type=int, default=60, help="cases of a run")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one run")
    return parser.parse_args()


def mutant_of(id: str) -> Mutant:
    return RIGHT if id == "right" else MUTANTS[id]


def chosen(one: Mutant, recipe: str, claims: Any, cases: dict[str, RunCase]) -> list[str]:
    """The case that the mutant is known to fail, then others by kind and in their order."""
    known = [one.kills[recipe]] if recipe in one.kills else []
    ids = [id for kind in KINDS for id in cases if id.startswith(kind) and id not in known]
    return [id for id in (*known, *ids) if cases[id].why_not(claims) is None]


def run_of(
    id: str, recipe: str, kernel: str, cases: dict[str, RunCase], enough: int, most: int
) -> dict[str, Any]:
    """One mutant in one recipe as one kernel."""
    one = mutant_of(id)
    target = Kernel(one, recipe, KERNELS[kernel])
    claims, diagnose, records, calls_of = target.capabilities, Diagnoser(), [], {}
    tried = 0
    for name in chosen(one, recipe, claims, cases):
        if tried == most or len(calls_of) >= enough:
            break
        calls = list(cases[name].make(claims))
        if not any(one.applies(call) for call in calls):
            continue
        tried += 1
        record = run_case(target, cases[name], diagnose)
        records.append(record)
        if record.diagnosis:
            calls_of[name] = calls
    named = {r.id: r.diagnosis["id"] for r in records if r.diagnosis}
    by_case = {name: kind_of(id, named[name], calls_of[name], claims) for name in named}
    verdict = most_likely(records)
    first = None if verdict is None else verdict["id"]
    read = explain_target(target)
    return {
        "explained": bool(read.wrong) and len(read.conclusion.explained) == read.wrong,
        "sentences": read.sentences,
        "tried": tried, "failed": sum(r.outcome != "pass" for r in records), "named": named,
        "cases": by_case, "verdict": first, "kind": kind_of_run(id, first, calls_of, claims),
    }  # fmt: skip


def kind_of(id: str, found: str | None, calls: list[Call], claims: Any) -> str:
    """Whether a name is right for a case."""
    if found is None or id == "right":
        return "none" if found is None else "wrong"
    if found == id:
        return "right"
    for call in calls:
        recipe = recipe_for(claims, call.formats)
        first, second = (run_mutant(MUTANTS[name], call, recipe) for name in (found, id))
        if not coincide(call, first, second, recipe):
            return "wrong"
    return "class"


def kind_of_run(id: str, found: str | None, calls_of: dict[str, list[Call]], claims: Any) -> str:
    """Whether the verdict is right: the mutant, or one of its class wherever that one applies."""
    if not calls_of:
        return "no failure"
    if found is None or found == id:
        return "none" if found is None else "right"
    shown = [
        calls
        for calls in calls_of.values()
        if found in MUTANTS and any(map(MUTANTS[found].applies, calls))
    ]
    kinds = {kind_of(id, found, calls, claims) for calls in shown}
    return "class" if kinds == {"class"} else "wrong"


def work(pipe: Any, task: tuple[str, str, str], *others: Any) -> None:
    try:
        pipe.send(run_of(*task, *others))
    except BaseException:  # told in the line of this mutant
        pipe.send({"kind": "error", "message": traceback.format_exc()[-2000:], "cases": {}})
    pipe.close()


def run_all(given: argparse.Namespace, tasks: list[tuple[str, str, str]]) -> None:
    """Some processes at a time, each for one task, each with its time limit."""
    context = multiprocessing.get_context("fork")
    cases = {case.id: case for case in run_cases("core")}
    left, running, started = list(tasks), {}, time.monotonic()
    with given.out.open("a", encoding="utf-8") as file:
        while left or running:
            while left and len(running) < given.jobs:
                task = left.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                others = (cases, given.enough, given.most)
                process = context.Process(target=work, args=(theirs, task, *others), daemon=True)
                process.start()
                theirs.close()
                running[task] = (process, ours, time.monotonic())
            for task, (process, pipe, since) in list(running.items()):
                line = outcome_of(process, pipe, time.monotonic() - since > given.limit)
                if line is None:
                    continue
                process.join()
                del running[task]
                head = dict(zip(("mutant", "recipe", "kernel"), task, strict=True))
                line = head | line | {"seconds": round(time.monotonic() - since, 1)}
                file.write(json.dumps(line) + "\n")
                file.flush()
                done, minutes = len(tasks) - len(left) - len(running), time.monotonic() - started
                print(f"{done} of {len(tasks)}, {minutes / 60:.1f} min: {' '.join(task)}: "
                      f"{line['kind']} {line.get('verdict')}", flush=True)  # fmt: skip
            time.sleep(0.02)


def outcome_of(process: Any, pipe: Any, late: bool) -> dict[str, Any] | None:
    """What a process gave; None while it works."""
    if pipe.poll():
        try:
            line: dict[str, Any] = pipe.recv()
        except EOFError:
            line = {"kind": "crash", "cases": {}}
        return line
    if not process.is_alive():
        return {"kind": "crash", "exit": process.exitcode, "cases": {}}
    if late:
        process.terminate()
        return {"kind": "timeout", "cases": {}}
    return None


def read(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def key(line: dict[str, Any]) -> tuple[str, str, str]:
    return line["mutant"], line["recipe"], line["kernel"]


def table(lines: list[dict[str, Any]]) -> str:
    """Shares by recipe and kernel, and what was not named right."""
    rows = [
        "| recipe | kernel | mutants | named | named or explained | share | cases | share of cases |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    mutants = [line for line in lines if line["mutant"] != "right"]
    for recipe, kernel in sorted({(line["recipe"], line["kernel"]) for line in mutants}):
        here = [line for line in mutants if (line["recipe"], line["kernel"]) == (recipe, kernel)]
        unseen = [line for line in here if recipe in MUTANTS[line["mutant"]].unseen]
        kinds = Counter(line["kind"] for line in here if line not in unseen)
        cases = Counter(kind for line in here for kind in line["cases"].values())
        right, count = (sum(kinds[x] for x in RIGHT_NAMES), kinds.total())
        told = sum(
            line["kind"] in RIGHT_NAMES or line.get("explained", False)
            for line in here
            if line not in unseen
        )
        good, all_cases = sum(cases[x] for x in RIGHT_NAMES), cases.total()
        rows.append(
            f"| {recipe} | {kernel} | {count} | {right} | {told} | {told / max(count, 1):.1%} | {all_cases} | "
            f"{good / max(all_cases, 1):.1%} |"
        )
    for line in lines:
        control = line["mutant"] == "right"
        seen = control or line["recipe"] not in MUTANTS[line["mutant"]].unseen
        fine = line["kind"] == "no failure" if control else line["kind"] in RIGHT_NAMES
        if seen and not fine:
            rows.append(
                f"\n{line['mutant']} in {line['recipe']}, {line['kernel']}: {line['kind']}, "
                f"{line.get('verdict')}; {line.get('named', line.get('message', ''))}"
                f"; explained: {line.get('explained')} {' '.join(line.get('sentences', ()))}"
            )
    unseen = [
        (line["mutant"], line["recipe"], line["verdict"])
        for line in mutants
        if line["recipe"] in MUTANTS[line["mutant"]].unseen and line.get("verdict")
    ]
    if unseen:
        rows.append(f"\nNamed though nothing should show: {unseen}")
    return "\n".join(rows)


def main() -> None:
    given = arguments()
    if not given.table:
        done = {key(line) for line in read(given.out) if line["kind"] not in BROKEN}
        ids = given.mutants or ["right", *MUTANTS]
        tasks = [(id, r, k) for id in ids for r in given.recipes for k in given.kernels]
        run_all(given, [task for task in tasks if task not in done])
    print(table(list({key(line): line for line in read(given.out)}.values())))


if __name__ == "__main__":
    main()
