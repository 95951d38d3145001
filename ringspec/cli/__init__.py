"""The command line: one file for each command, and here the group that holds them.

Exit codes: 0; 1 when a ring differs from the definition beyond its bound; 2 for bad input, with one
paragraph on stderr; 130 after Ctrl-C.
"""

from __future__ import annotations

from typing import Any

import click

import ringspec
from ringspec.cli.schedule import schedule_command
from ringspec.cli.simulate import simulate_command
from ringspec.errors import RingspecError, nearest


class BadInput(click.ClickException):
    """What the user gave cannot be done."""

    exit_code = 2


class Commands(click.Group):
    """A group that suggests the nearest command and turns errors into messages."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            ctx.fail(f"no command {args[0]!r}: {nearest(args[0], self.commands)}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except RingspecError as error:
            raise BadInput(str(error)) from None
        except BrokenPipeError:  # click ends quietly when nobody reads stdout any more
            raise
        except OSError as error:
            raise BadInput(str(error)) from None
        except MemoryError:
            raise BadInput("not enough memory for a problem of this size") from None
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            raise click.exceptions.Exit(130) from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(
    ringspec.__version__,
    prog_name="ringspec",
    message=f"%(prog)s %(version)s (specification {ringspec.SPEC_VERSION})",
)
def main() -> None:
    """The executable specification of ring attention."""


main.add_command(simulate_command)
main.add_command(schedule_command)
