"""The command `headrace reshard`: move partitions between the shards of a running server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import typer
from rich.console import Console

from headrace.paramserver.observe.status_query import StatusAccess
from headrace.paramserver.reshard.coordinator import Reshard, Wish, change_wish, start
from headrace.paramserver.reshard.inventory import Goal, drain
from headrace.paramserver.reshard.planner import Plan, make_plan
from headrace.paramserver.reshard.server_shards import ServerShards
from headrace.paramserver.reshard.survey import Survey, look_around
from headrace.paramserver.system.text import counted
from headrace.schemas.errors import ConfigError, RequestError, UnavailableError
from headrace.schemas.idl import idl
from headrace.schemas.partition_map import PartitionMap
from headrace.scripts.commands.terminal import (
    Access,
    AsJson,
    ServerFlag,
    escape,
    number_table,
    option,
    output_console,
    print_line,
    show_count,
    with_server_flags,
)

__all__ = ["reshard"]

_POLL_S = 0.5
_TIMEOUT_S = 10.0
_WISHES = {"pause": Wish.PAUSE, "resume": Wish.RUN, "abort": Wish.ABORT}

_Action = Literal["start", "status", "pause", "resume", "abort"]
_Balance = Literal["bytes", "rows", "updates"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wanted:
    """What the flags of `start` ask for."""

    shards: int | None
    partitions: tuple[int, ...]
    to: int | None
    drained: str | None
    balance: _Balance | None

    def plan(self, survey: Survey) -> Plan:
        """Return the plan; raises RequestError if none can work."""
        cluster, loads, balance = survey.cluster, survey.loads, self.balance or "bytes"
        num_shards, owners = len(cluster.shards), np.unique(loads.owner).tolist()
        if self.drained is not None:
            return make_plan(cluster, loads, drain(cluster, loads, self.drained, balance=balance))
        if self.to is not None:
            return self._plan_moves(survey, self.to)
        if self.shards is not None and self.shards > num_shards:
            raise RequestError(
                f"--shards {self.shards}: the server has {num_shards}; restart it with so many first, see "
                "docs/operations.md#more-shards-and-fewer"
            )
        goal = tuple(owners) if self.shards is None else tuple(range(self.shards))
        return make_plan(cluster, loads, Goal(shards=goal, balance=balance))

    def _plan_moves(self, survey: Survey, to: int) -> Plan:
        cluster, loads = survey.cluster, survey.loads
        if (last := self.partitions[-1]) >= len(loads.owner):
            raise RequestError(f"--move {last}: there are partitions 0 to {len(loads.owner) - 1}")
        if to >= len(cluster.shards):
            raise RequestError(f"--to {to}: there are shards 0 to {len(cluster.shards) - 1}")
        owner = loads.owner.copy()
        owner[list(self.partitions)] = to
        goal = Goal(shards=tuple(np.unique(owner).tolist()), evens_out=False)
        return make_plan(cluster, loads, goal, owner=owner)


@with_server_flags
def reshard(
    action: Annotated[_Action, typer.Argument(help="What to do.", show_default=False)],
    *,
    server: ServerFlag = None,
    shards: Annotated[
        int | None, option("Spread all partitions over shards 0 to N - 1; the others end empty.", "N", min=1)
    ] = None,
    move: Annotated[str | None, option("Move these partitions, such as 0-99,512; with --to.", "PARTITIONS")] = None,
    to: Annotated[int | None, option("The shard that gets the partitions of --move.", "SHARD", min=0)] = None,
    drain: Annotated[str | None, option("Empty all shards of a node.", "NODE")] = None,
    balance: Annotated[
        _Balance | None, option("What is evened out: bytes, rows or updates. Alone, among the shards that own some.")
    ] = None,
    plan: Annotated[bool, option("Print what would move, and begin nothing.", None, "--plan")] = False,
    wait: Annotated[bool, option("With start and resume: follow it to its end.", None, "--wait")] = False,
    link_mbytes_s: Annotated[
        float | None, option("Speed of a link between two nodes; measured from here if not given.", "MB/S", min=0.001)
    ] = None,
    as_json: AsJson = False,
    access: Access,
) -> int:
    """Move rows of a running server between its shards, while training and serving go on.

    `start` makes a plan and lets the server carry it out, by itself and whoever dies; `--plan` only prints it. Rows
    move in partitions: `--shards` spreads them over the first shards, `--drain` empties a node, `--move` takes some to
    a shard, and `--balance` evens out what the shards have. `pause` lets the present stage end and begins no other;
    `abort` gives up what is not decided yet, and what has moved stays. Exit code 1 if `--wait` sees the reshard end
    early or pause.

    Raises:
        ConfigError: Flags that do not go together.
        RequestError: No plan can work, or a client, a standby or another reshard is in the way.
        UnavailableError: A shard does not answer.
    """
    wanted = _check_flags(action, shards, move, to, drain, balance)
    if plan and action != "start":
        raise ConfigError("--plan goes with start")
    link_bytes_s = None if link_mbytes_s is None else link_mbytes_s * 1e6
    reach = access(server, timeout_s=_TIMEOUT_S)
    if action == "start":
        return asyncio.run(_start(reach, wanted, link_bytes_s, plans=plan, waits=wait, as_json=as_json))
    if action == "status":
        return asyncio.run(_show_status(reach, as_json=as_json))
    return asyncio.run(_change(reach, action, waits=wait and action == "resume", as_json=as_json))


def _check_flags(
    action: _Action, shards: int | None, move: str | None, to: int | None, drained: str | None, balance: _Balance | None
) -> _Wanted:
    given = [
        name for name, value in (("--shards", shards), ("--move", move), ("--drain", drained)) if value is not None
    ]
    if action != "start" and (given or balance or to is not None):
        raise ConfigError(f"{(given or ['--balance' if balance else '--to'])[0]} goes with start")
    if (move is None) != (to is None):
        raise ConfigError("--move and --to go together")
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[1]}: give one of them")
    if move is not None and balance is not None:
        raise ConfigError("--balance: --move says itself what moves")
    if action == "start" and not given and balance is None:
        raise ConfigError("say what shall move: --shards, --drain, --move with --to, or --balance")
    partitions = () if move is None else _parse_partitions(move)
    return _Wanted(shards=shards, partitions=partitions, to=to, drained=drained, balance=balance)


def _parse_partitions(text: str) -> tuple[int, ...]:
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not (first.isdecimal() and (not last or last.isdecimal())) or int(last or first) < int(first):
            raise ConfigError(f"--move {text}: give numbers and ranges, such as 0-99,512")
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


async def _reach(access: StatusAccess) -> ServerShards:
    dial = replace(access.dial(idl.Role.ADMIN), knows_partitions=True)
    return await ServerShards.reach(dial, access.seeds)


async def _start(
    access: StatusAccess, wanted: _Wanted, link_bytes_s: float | None, *, plans: bool, waits: bool, as_json: bool
) -> int:
    async with await _reach(access) as shards:
        survey = await look_around(shards, link_bytes_s=link_bytes_s)
        plan = wanted.plan(survey)
        strangers = await shards.without_partitions()
        made = None if plans else await start(shards, lambda _: plan)
        if as_json:
            answer = {"plan": plan.to_dict(), "notes": survey.notes, "without_partitions": strangers}
            print(json.dumps({**answer, "is_started": made is not None}))
        else:
            print(plan.text())
            for note in survey.notes:
                print_line(f"Not measured: {note}.")
            if plans and strangers:
                print_line(
                    f"It cannot start yet: {', '.join(strangers)}: connected, and do not know partitions. Upgrade."
                )
            if made is not None:
                print("Started. The server goes on by itself: see headrace reshard status.")
        if made is None or not waits:
            return 0
        return await _follow(shards, made)


async def _change(access: StatusAccess, action: str, *, waits: bool, as_json: bool) -> int:
    async with await _reach(access) as shards:
        changed = await change_wish(shards, _WISHES[action])
        if as_json:
            print(json.dumps({"wish": str(changed.wish), "num_stages": len(changed.stages)}))
        else:
            print(
                {
                    Wish.PAUSE: "Pausing: the present stage goes to its end, and no other begins.",
                    Wish.RUN: "Resumed.",
                    Wish.ABORT: "Aborting: what is not decided is given up, and what has moved stays.",
                }[changed.wish]
            )
        return await _follow(shards, changed) if waits else 0


async def _follow(shards: ServerShards, followed: Reshard) -> int:
    """Wait until a reshard is over or paused; return the exit code. Cancellation: the server goes on."""
    with show_count("Moving partitions") as bar:
        while True:
            found = await _look(shards)
            if found is None or found.wish == str(Wish.PAUSE):
                break
            if found.num_partitions:
                bar.update(found.num_moved, found.num_partitions)
            await asyncio.sleep(_POLL_S)
    if found is not None:
        print("The reshard is paused.")
        return 1
    known = await shards.partition_map()
    is_done = all(move.apply_to(known) is known for stage in followed.stages for move in stage)
    print("All partitions have moved." if is_done else "The reshard was aborted before its end.")
    return 0 if is_done else 1


async def _look(shards: ServerShards) -> Any:
    """Return the present `idl.ReshardStatus`, None when it is over; a shard that restarts is waited for."""
    while True:
        try:
            if (found := (await shards.links[0].status()).reshard) is not None or await shards.load() is None:
                return found
        except UnavailableError:
            pass
        await asyncio.sleep(_POLL_S)


async def _show_status(access: StatusAccess, *, as_json: bool) -> int:
    async with await _reach(access) as shards:
        known = await shards.partition_map()
        statuses = await asyncio.gather(*(link.status() for link in shards.links))
    found = statuses[0].reshard
    moves = [move for status in statuses for move in status.moves or () if move.destination == status.shard]
    counts = np.bincount(known.owners, minlength=len(statuses)).tolist()
    if as_json:
        print(json.dumps(_status_to_json(found, moves, counts, known)))
    else:
        _show(found, moves, counts, output_console())
    return 0


_MOVE_FIELDS = (
    *("move_id", "source", "destination", "num_partitions", "step", "phase"),
    *("copied_bytes", "copied_rows", "records_behind", "error"),
)
_RESHARD_FIELDS = ("wish", "num_stages", "num_moved", "num_partitions", "failure")


def _status_to_json(found: Any, moves: Sequence[Any], counts: list[int], known: PartitionMap) -> dict[str, Any]:
    return {
        "reshard": found and {name: getattr(found, name) for name in _RESHARD_FIELDS},
        "moves": [{name: getattr(move, name) for name in _MOVE_FIELDS} for move in moves],
        "partitions_by_shard": counts,
        "num_partitions": known.num_partitions,
    }


def _show(found: Any, moves: Sequence[Any], counts: list[int], console: Console) -> None:
    if found is None:
        console.print("No reshard is under way.")
    else:
        moved = f"{found.num_moved:,} of {found.num_partitions:,} partitions have moved"
        text = f"{moved}, in {counted(found.num_stages, 'stage')}"
        wish = escape(found.wish)
        console.print(f"[bold]{wish}[/bold]  {text}" if found.num_partitions else f"[bold]{wish}[/bold]")
        if found.failure:
            console.print(f"[bold yellow]{escape(found.failure)}[/bold yellow]", soft_wrap=True)
    if moves:
        table = number_table("from>", "to>", "partitions>", "step", "phase", "copied rows>", "records behind>", "")
        for move in moves:
            table.add_row(
                *(
                    str(move.source),
                    str(move.destination),
                    f"{move.num_partitions:,}",
                    escape(move.step),
                    escape(move.phase or ""),
                ),
                *("" if number is None else f"{number:,}" for number in (move.copied_rows, move.records_behind)),
                escape(move.error or ""),
            )
        console.print(table)
    owned = ", ".join(f"shard {shard}: {count:,}" for shard, count in enumerate(counts))
    console.print(f"Partitions: {owned}.", soft_wrap=True)
