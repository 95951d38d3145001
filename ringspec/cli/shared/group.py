"""Groups of commands: suggest the nearest name for an unknown command, and print errors as messages."""

from __future__ import annotations

from typing import Any

import click

from ringspec.cli.shared.ranks import usage_said_once
from ringspec.errors import RingspecError, nearest


class BadInput(click.ClickException):
    """The error for an input or option that the command cannot accept."""

    exit_code = 2


class Commands(click.Group):
    """A group that suggests the nearest name for an unknown command, and prints errors as messages."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            ctx.fail(
                f"expected a command; got {args[0]!r}. Fix: {nearest(args[0], self.commands)}."
            )
        return super().resolve_command(ctx, args)

    def make_context(self, *words: Any, **extra: Any) -> click.Context:
        with usage_said_once():
            return super().make_context(*words, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with usage_said_once():
                return super().invoke(ctx)
        except RingspecError as error:
            raise BadInput(str(error)) from None
        except BrokenPipeError:  # stdout was closed: click ends quietly
            raise
        except FileNotFoundError as error:
            at = error.filename
            raise BadInput(f"expected a file at {at!r}; got none. Fix: check the path.") from None
        except OSError as error:
            raise BadInput(str(error)) from None
        except MemoryError:
            raise BadInput("not enough memory for a problem of this size") from None
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            raise click.exceptions.Exit(130) from None
