"""The command `headrace expire`: delete the rows of a running server that its expiry policies select, or count them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer

from headrace.paramserver.expiry.policy import ExpiryPolicy
from headrace.paramserver.observe.status_query import StatusAccess
from headrace.paramserver.reading.link import ShardLink, link_all
from headrace.paramserver.system.text import describe_near
from headrace.schemas.errors import ConfigError, GoneError, HeadraceError, OverloadedError, RequestError
from headrace.schemas.idl import idl
from headrace.schemas.table_names import matches
from headrace.scripts.commands.terminal import (
    Access,
    AsJson,
    ServerFlag,
    escape,
    number_table,
    output_console,
    print_line,
    show_rows,
    with_server_flags,
)

__all__ = ["expire"]

_ASK_EVERY_MS = 500


@dataclass(slots=True)
class _TableResult:  # as in the command's JSON
    fqn: str
    num_scanned: int = 0
    num_live: int = 0
    num_expired: int = 0
    by_policy: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@with_server_flags
def expire(
    *,
    server: ServerFlag = None,
    table: Annotated[
        str,
        typer.Option(
            metavar="PATTERN",
            help="Only tables of this name or path, or a pattern such as `user.*`. Default: all with a policy.",
        ),
    ] = "",
    policy: Annotated[
        str | None,
        typer.Option(metavar="POLICY", help="Replaces the server's: `ttl_s=7d, max_rows=1000000`.", show_default=False),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count the rows that would go; delete nothing.", show_default=False)
    ] = False,
    as_json: AsJson = False,
    access: Access,
) -> int:
    """Delete the rows of a running server that its expiry policies select.

    Training goes on meanwhile. Every shard reads all of its rows, at most at the server's `--expiry-rows-per-s`. A
    shard makes one pass at a time: the command first waits for one that is running. If you interrupt the command, the
    server goes on. Exit code 1 when a shard could not finish.
    """
    if policy is not None:
        try:
            ExpiryPolicy.parse(policy)
        except ConfigError as exc:
            raise ConfigError(f"--policy: {exc}") from exc
    request = idl.ExpireRowsRequest(fqn=table, is_dry_run=dry_run, wait_ms=_ASK_EVERY_MS, policy=policy)
    with show_rows("Looking") as bar:
        results, errors = asyncio.run(_expire_all(access(server, timeout_s=10.0), request, bar.update))
    if as_json:
        answer = {
            "is_dry_run": dry_run,
            "num_expired": sum(result.num_expired for result in results),
            "num_scanned": sum(result.num_scanned for result in results),
            "tables": [asdict(result) for result in results],
            "errors": errors,
        }
        print(json.dumps(answer, indent=2))
    else:
        _show(results, errors, is_dry_run=dry_run)
    return 1 if errors else 0


async def _expire_all(
    access: StatusAccess, request: Any, on_progress: Callable[[int, int], None]
) -> tuple[list[_TableResult], list[str]]:
    """Expire on every shard at once; return the tables by name, and for each unfinished shard the reason."""
    dial = access.dial(idl.Role.ADMIN)
    links = await link_all(dial, access.seeds)
    scanned, totals = [0] * len(links), [0] * len(links)

    async def follow(number: int) -> Any:
        def note(rows: int) -> None:
            scanned[number] = rows
            on_progress(sum(scanned), max(sum(totals), sum(scanned)))

        tables = (await links[number].status()).tables
        names = [table.spec.fqn for table in tables]
        if request.fqn and not any(matches(name, request.fqn) for name in names):
            near = describe_near(request.fqn, names)
            raise RequestError(f"--table {request.fqn!r}: no such table on this server; {near}")
        totals[number] = sum(table.num_rows_estimate for table in tables)
        return await _follow(links[number], request, note)

    try:
        answers = await asyncio.gather(*(follow(number) for number in range(len(links))), return_exceptions=True)
    finally:
        await asyncio.gather(*(link.close() for link in links))
    wrong = [answer for answer in answers if isinstance(answer, BaseException)]
    # A wrong request, or a failure of every shard, is an error like any other.
    for exc in wrong:
        if isinstance(exc, RequestError) or not isinstance(exc, HeadraceError) or len(wrong) == len(answers):
            raise exc
    problems = [str(answer) if isinstance(answer, BaseException) else answer.error for answer in answers]
    errors = [f"shard {shard}: {text}" for shard, text in enumerate(problems) if text]
    return _add_up([answer for answer in answers if not isinstance(answer, BaseException)]), errors


async def _follow(link: ShardLink, request: Any, note: Callable[[int], None]) -> Any:
    """Begin a pass on a shard, once none is running there, and ask after it until it is done."""
    reply, was_told = None, False
    while reply is None:
        try:
            reply = await link.expire_rows(request)
        except OverloadedError as exc:  # it passes by itself, after long if there are many rows
            if not was_told:
                print_line(f"waiting for {link.address}: {exc}", to_stderr=True)
            was_told = True
            await asyncio.sleep(max(exc.retry_after_s, _ASK_EVERY_MS / 1000))
    while not reply.is_done:
        note(reply.scanned)
        dry, number = request.is_dry_run, reply.run_number
        after = idl.ExpireRowsRequest(fqn="", is_dry_run=dry, wait_ms=_ASK_EVERY_MS, run_number=number)
        try:
            reply = await link.expire_rows(after)
        except GoneError as exc:
            raise HeadraceError(f"{exc}; what has been deleted stays deleted") from exc
    note(reply.scanned)
    return reply


def _add_up(replies: list[Any]) -> list[_TableResult]:
    results: dict[str, _TableResult] = {}
    for reply in replies:
        for table in reply.tables:
            result = results.setdefault(table.fqn, _TableResult(fqn=table.fqn))
            result.num_scanned += table.scanned
            result.num_live += table.live
            result.num_expired += table.expired
            for count in table.by_policy:
                result.by_policy[count.policy] = result.by_policy.get(count.policy, 0) + count.num_rows
            if table.note and table.note not in result.notes:
                result.notes.append(table.note)
    for result in results.values():
        result.by_policy = dict(sorted(result.by_policy.items()))
    return [results[fqn] for fqn in sorted(results)]


def _show(results: list[_TableResult], errors: list[str], *, is_dry_run: bool) -> None:
    console = output_console()
    if results:
        gone = "would go>" if is_dry_run else "expired>"
        shown = number_table("table", "rows>", gone, "by policy")
        for result in results:
            by_policy = ", ".join(f"{name} {count:,}" for name, count in result.by_policy.items())
            counts = (f"{count:,}" for count in (result.num_live, result.num_expired))
            shown.add_row(escape(result.fqn), *counts, by_policy)
        console.print(shown)
    for result in results:
        for note in result.notes:
            console.print(f"{escape(result.fqn)}: {escape(note)}.", soft_wrap=True)
    for error in errors:
        console.print(f"[bold red]not finished:[/bold red] {escape(error)}", soft_wrap=True)
