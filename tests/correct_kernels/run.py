"""Run the collection against the judge and list its alarms. All members are correct: each alarm is a fault.

``PYTHONPATH=.:tests python tests/correct_kernels/run.py --profile noise --seeds 20 --jobs 16 --json out.jsonl``
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

# Processes share the cores, so each uses one thread. NumPy reads this when it is first imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import click
import numpy as np
from correct_kernels.members import MEMBERS
from correct_kernels.target import WAYS, member_target

from ringspec.compare.noise.problem import Geometry
from ringspec.conformance.cases import noise as noise_cases
from ringspec.conformance.cases.model import RunCase
from ringspec.conformance.cases.profiles import run_cases
from ringspec.conformance.judge import noise as noise_judge
from ringspec.conformance.report.records import FAILURES
from ringspec.conformance.run.case import run_case

PROGRESS = 20  # cases between two lines on stderr


@dataclass(frozen=True)
class Work:
    """One case for all members. ``seed`` and ``tokens`` of a noise case; no seed for a case of another profile."""

    profile: str
    index: int
    id: str
    seed: int | None
    tokens: int = noise_cases.TOKENS


@dataclass(frozen=True)
class Alarm:
    """One failure of a correct kernel. ``tests``: what alarmed, with its statistic."""

    member: str
    way: str
    case: str
    seed: int | None
    outcome: str
    tests: tuple[str, ...]
    message: str


@dataclass(frozen=True)
class Done:
    """What one case gave: how many members ran it, the noise ratios that they showed, the alarms."""

    work: Work
    seconds: float
    ran: int
    rms: dict[str, dict[str, float]]
    alarms: tuple[Alarm, ...]


def noise_work(seeds: int, formats: Iterable[str]) -> list[Work]:
    """The noise cases of these formats, each with the seeds 0 to seeds - 1."""
    ids = [case.id for case in noise_cases.cases()]
    chosen = [(i, id) for i, id in enumerate(ids) if id.rsplit("-", 1)[1] in formats]
    return [Work("noise", i, id, seed) for seed in range(seeds) for i, id in chosen]


def core_work() -> list[Work]:
    """The cases of profile core; its noise cases are left to :func:`noise_work`."""
    return [
        Work("core", i, case.id, None)
        for i, case in enumerate(known_cases("core"))
        if not case.id.startswith("noise/")
    ]


def case_of(work: Work) -> RunCase:
    """The case itself, built where it is run."""
    if work.seed is None:
        return known_cases(work.profile)[work.index]
    seeded = functools.partial(noise_cases.problem, seed=work.seed, tokens=work.tokens)
    with mock.patch.object(noise_cases, "problem", seeded):
        return list(noise_cases.cases())[work.index]


@functools.cache
def known_cases(profile: str) -> list[RunCase]:
    return run_cases(profile)


@contextlib.contextmanager
def predicts_once() -> Iterator[None]:
    """Predict once for all members of a case."""
    predict, known = noise_judge.predict, {}

    def predicted(
        attention: Any, recipe: Any, geometry: Geometry | None = None, **more: Any
    ) -> Any:
        arrays = () if geometry is None else vars(geometry).items()
        ring = tuple((name, x.tobytes() if isinstance(x, np.ndarray) else x) for name, x in arrays)
        key = (id(attention), recipe, ring, tuple(sorted(more.items())))
        if key not in known:
            # The attention is kept beside its noise, so that its id stays taken.
            known[key] = predict(attention, recipe, geometry, **more), attention
        return known[key][0]

    with mock.patch.object(noise_judge, "predict", predicted):
        yield


@contextlib.contextmanager
def fast_judge() -> Iterator[None]:
    """Predict once for all members of a case, and infer no recipe after an alarm."""
    with predicts_once(), mock.patch.object(noise_judge, "inferred", lambda *_: ()):
        yield


def done(work: Work, members: tuple[str, ...], ways: tuple[str, ...]) -> Done:
    """One case against all members, in each of the ``ways`` to declare a recipe that is one of theirs."""
    started, case = time.perf_counter(), case_of(work)
    ran, rms, alarms = 0, {}, []
    with fast_judge():
        for name in members:
            for way in ways:
                if way == "declared" and not MEMBERS[name].declares:
                    continue
                record = run_case(member_target(name, way), case)
                if record.outcome == "not claimed":
                    continue
                ran += 1
                noise = record.noise or {}
                if noise:
                    rms[name] = noise["rms"]
                if record.outcome in FAILURES:
                    told = tuple(noise.get("alarms", ()))
                    alarms.append(
                        Alarm(name, way, work.id, work.seed, record.outcome, told, record.message)
                    )
    return Done(work, time.perf_counter() - started, ran, rms, tuple(alarms))


def done_of(task: tuple[Work, tuple[str, ...], tuple[str, ...]]) -> Done:
    return done(*task)


def results(
    work: list[Work], members: tuple[str, ...], ways: tuple[str, ...], jobs: int
) -> Iterator[Done]:
    """Each case's result as it is done; in this process with one job."""
    tasks = [(one, members, ways) for one in work]
    if jobs == 1:
        yield from map(done_of, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(done_of, tasks)


def recorded(output: str | None) -> list[Done]:
    """The results of an earlier run that stand in this file; none if there is no such file."""
    if output is None or not os.path.exists(output):
        return []
    with open(output) as file:
        lines = [json.loads(line) for line in file if line.endswith("\n")]
    for line in lines:
        line["work"] = Work(**line["work"])
        line["alarms"] = tuple(
            Alarm(**alarm | {"tests": tuple(alarm["tests"])}) for alarm in line["alarms"]
        )
    return [Done(**line) for line in lines]


def table(found: list[Done]) -> list[str]:
    """Alarms by member and by whether its recipe was declared."""
    lines = []
    for name in MEMBERS:
        for way in WAYS:
            own = [x for one in found for x in one.alarms if (x.member, x.way) == (name, way)]
            if own:
                cases = sorted({alarm.case for alarm in own})
                lines.append(
                    f"{name}, {way}: {len(own)} alarms in "
                    f"{len(cases)} cases, such as {', '.join(cases[:3])}"
                )
    return lines


@click.command()
@click.option(
    "--profile", type=click.Choice(["noise", "core", "both"]), default="noise", show_default=True
)
@click.option("--seeds", default=20, show_default=True, help="Seeds of each noise case.")
@click.option("--formats", default="bf16,fp16,f32", show_default=True, help="Of the noise cases.")
@click.option(
    "--members", default=",".join(MEMBERS), help="Names, separated by commas; default: all."
)
@click.option("--cases", default="", help="Only cases whose id contains this text.")
@click.option("--ways", default=",".join(WAYS), show_default=True, help="How recipes are declared.")
@click.option("--jobs", default=1, show_default=True, help="Processes.")
@click.option(
    "--json", "output", type=click.Path(dir_okay=False),
    help="Add a line for each case as it is done; cases in the file are not run again.",
)  # fmt: skip
def main(
    profile: str, seeds: int, formats: str, members: str, cases: str, ways: str, jobs: int,
    output: str | None,
) -> None:  # fmt: skip
    """Run correct kernels against the judge. Exit status 1: some were accused."""
    names = tuple(members.split(","))
    for name in names:
        if name not in MEMBERS:
            raise click.BadParameter(f"expected one of {', '.join(MEMBERS)}, got {name!r}")
    work = [] if profile == "core" else noise_work(seeds, formats.split(","))
    work += [] if profile == "noise" else core_work()
    work = [one for one in work if cases in one.id]
    found = recorded(output)
    known = {one.work for one in found}
    for one in results([x for x in work if x not in known], names, tuple(ways.split(",")), jobs):
        found.append(one)
        if output:
            with open(output, "a") as file:
                file.write(json.dumps(asdict(one)) + "\n")
        for alarm in one.alarms:
            told = "; ".join(alarm.tests) or alarm.message
            seed = "" if alarm.seed is None else f", seed {alarm.seed}"
            click.echo(f"{alarm.member}, {alarm.way}: {alarm.case}{seed}: {alarm.outcome}: {told}")
        sys.stdout.flush()
        if len(found) % PROGRESS == 0:
            click.echo(f"{len(found)} of {len(work)} cases", err=True)
    ran, accused = sum(one.ran for one in found), sum(len(one.alarms) for one in found)
    click.echo("\n".join(table(found)))
    click.echo(f"{accused} alarms in {ran} runs of {len(work)} cases; {len(names)} correct kernels")
    sys.exit(1 if accused else 0)


if __name__ == "__main__":
    main()
