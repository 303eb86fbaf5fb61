"""The command `headrace bench`: what Headrace costs and how fast it is, each figure next to its own limit or peer.

To add a bench, add an entry to `_BENCHES`. Its target is a plain function, as for `headrace.cli`; it is imported when
its arguments are parsed. Benches run from a checkout of the source: an installed package does not have them.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import typer
import typer.core

from headrace.cli import LazyCommand

__all__ = ["bench", "check_checkout"]

# Name, which is also that of the module and its function, and help.
_BENCHES = (
    ("ingest", "How fast a shard takes rows, next to disk, RocksDB and Redis, and applies its log again."),
    ("wire", "How fast requests travel, next to gRPC and thriftpy2."),
    ("overhead", "What streaming costs a trainer."),
    ("freshness", "How late a replica shows an update, next to a floor."),
    ("lookup", "How fast a replica looks up, next to torch and Redis."),
    ("follow", "What a follower costs its source, and how long handing over takes."),
    ("replicated", "What a replicated log costs a shard, next to its engine."),
    ("kernels", "How fast rows are marked, packed, digested and routed."),
)


def check_checkout(command: str, package: str) -> None:
    """Exit with 2 and one line if a package that only a checkout has is missing."""
    if importlib.util.find_spec(f"headrace.scripts.{package}") is None:
        text = f"`headrace {command}` needs a checkout of the source: clone it, run scripts/setup-venv, and repeat the"
        typer.echo(f"headrace: error: {text} command with .venv/bin/headrace there", err=True)
        raise typer.Exit(2)


class _Benches(typer.core.TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, help_text in _BENCHES:
            self.add_command(LazyCommand(name, f"headrace.scripts.benches.{name}:{name}", help_text))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Show no benches where there are none; a shell that completes gets no message."""
        if not ctx.resilient_parsing:
            check_checkout("bench", "benches")
        return super().parse_args(ctx, args)


bench = typer.Typer(add_completion=False, no_args_is_help=True, cls=_Benches)


@bench.callback()
def _front_door() -> None:
    """Measure Headrace on this machine, each figure next to its own limit or peer."""
