"""``ringspec power``: compute the smallest errors that ``ringspec check`` can detect in an implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ringspec.cli.commands.check import TARGETS, target_argument

if TYPE_CHECKING:
    from ringspec.conformance.target.capabilities import Capabilities

EPILOG = f"""{TARGETS}

\b
Examples:
  ringspec power my_kernel.py:target
  ringspec power --recipe bf16

\b
Exit code: 0; 2 for bad input; 130 after Ctrl-C."""


@click.command(
    "power", epilog=EPILOG, short_help="Show which errors a check could not see, before it runs."
)
@target_argument
@click.option(
    "--profile",
    type=click.Choice(["smoke", "core", "full", "noise"]),
    default="core",
    show_default=True,
    help="The profile of the check.",
)
@click.option(
    "--recipe",
    metavar="NAME",
    help="How the kernel rounds, such as bf16, instead of what TARGET declares. Without TARGET, for a kernel that "
    "claims everything in the formats of the recipe.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of text.")
def power_command(target: str | None, profile: str, recipe: str | None, as_json: bool) -> None:
    """Show the smallest errors that a check of TARGET detects, without running TARGET.

    Instead, a correct program runs, which claims to support the same cases and rounds where TARGET declares that it
    rounds (its recipe). The report of "ringspec check" ends with the same table. Smaller errors may pass.
    """
    from ringspec.cli.shared import output
    from ringspec.cli.shared.progress import counting
    from ringspec.conformance.cases.profiles import run_cases
    from ringspec.conformance.report.limits import as_data
    from ringspec.conformance.report.limits_text import limit_lines
    from ringspec.conformance.run.power import power_of

    claims = claims_of(target, recipe)
    with counting(profile, wanted=not as_json) as progress:
        limits = power_of(claims, run_cases(profile), progress)
    if as_json:
        output.show_json({"command": "power", "profile": profile, **as_data(limits)})
        return
    lines = limit_lines(limits, f"profile {profile}")
    output.show(lines or [f"no case of profile {profile} is claimed that has a limit"])


def claims_of(target: str | None, recipe: str | None) -> Capabilities:
    """Return what TARGET claims to support, and its recipe. If ``recipe`` is given, it replaces the recipe of TARGET.

    If only ``recipe`` is given, return the claims of the specification, with this recipe.
    """
    import dataclasses

    from ringspec.conformance.run.opening import close, opened
    from ringspec.conformance.target.project import target_or_default
    from ringspec.conformance.targets.reference import Reference
    from ringspec.recipes import recipe as recipe_of

    if target is None and recipe is not None:
        return Reference(recipe_of(recipe)).capabilities
    found = opened(target_or_default(target))
    try:
        claims: Capabilities = found.capabilities
    finally:
        close(found)
    return claims if recipe is None else dataclasses.replace(claims, recipe=recipe_of(recipe).name)
