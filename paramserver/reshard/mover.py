"""Runs the moves in which a shard takes part: goes on with them at its start, and answers for them.

As a destination it runs each of its moves, and again after each failure that may pass. As a source it answers, and
lets a seal lapse once its destination has been silent. Whether somebody wants a move given up is kept in memory
only: who wants that asks again while the move is under way, as the coordinator does.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, NoReturn, Self

from headrace.paramserver.reshard.destination import DestinationMove
from headrace.paramserver.reshard.move_messages import move_from_idl, position_from_idl, position_to_idl
from headrace.paramserver.reshard.moving_shard import MovingShard
from headrace.paramserver.reshard.remote_source import MoveReport, Nodes, RemoteSource
from headrace.paramserver.reshard.source_moves import SourceMoves
from headrace.paramserver.rpc.outages import Backoff
from headrace.paramserver.system.event_loop import background_task
from headrace.paramserver.system.log_lines import fact
from headrace.schemas.errors import CorruptionError, GoneError, HeadraceError, RequestError
from headrace.schemas.idl import idl
from headrace.schemas.log_records import pack_header
from headrace.schemas.move_records import Move, MoveRecord, MoveStep, Position

__all__ = ["Mover"]

_log = logging.getLogger(__name__)

# Longer than a destination takes to start again; meanwhile trainers cannot write the partitions.
_SILENCE_S = 20.0
_LOOK_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
# Others wait: each copy is a load on both shards.
_RUN_AT_ONCE = 4
# Errors of moves that were given up or refused, for status.
_MAX_REPORTS = 64


class Mover:
    """The moves of one shard. Use it with `async with`. Thread: the loop's."""

    def __init__(
        self,
        shard: MovingShard,
        nodes: Nodes,
        *,
        number: int,
        server_id: str,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Run the moves of shard `number`."""
        self._shard, self._nodes, self._number, self._server_id = shard, nodes, number, server_id
        self._clock_s = clock_s
        self._source = SourceMoves(shard)
        self._heard_s: dict[str, float] = {}  # when the destinations of open moves were heard of
        self._running: dict[str, asyncio.Task[None]] = {}
        self._moves: dict[str, Move] = {}  # of `_reports`
        self._reports: dict[str, MoveReport] = {}
        self._ended: set[str] = set()  # moves of this destination that its source has purged
        self._turns = asyncio.Semaphore(_RUN_AT_ONCE)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for each in self._shard.partitions.moves:
            if each.move.destination == self._number and each.step in (MoveStep.COPY, MoveStep.ACTIVATE):
                self._run(each.move)
        for work, name in ((self._keep(), "headrace-moves"), (self._purge_left(), "headrace-purge")):
            await self._stack.enter_async_context(background_task(work, name=name))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()
        running = list(self._running.values())
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        await self._shard.close_idle(idle_s=0)

    # As a destination.

    async def move_partitions(self, request: Any) -> Any:
        """Answer an `idl.MovePartitionsRequest`. Cancellation: harmless.

        Raises:
            RequestError: This is not the move's destination, or what it owns forbids the move.
        """
        move = self._checked(request, at_source=False)
        progress = self._shard.partitions.moves.find_same(move)
        if request.kind == idl.MoveRequestKind.CARRY_OUT:
            if progress is None and not self._is_over(move):
                at = Position(seq=0, mark=None)
                self._shard.partitions.check(MoveRecord(step=MoveStep.COPY, move=move, position=at))
                self._run(move)
            elif progress is not None and progress.step is MoveStep.PURGE:
                raise RequestError(f"move {move.move_id!r} was given up: {self._error_of(move)}")
        elif request.kind == idl.MoveRequestKind.ABORT:
            is_copying = progress is not None and progress.step is MoveStep.COPY
            if is_copying or move.move_id in self._running:
                self._shard.aborts.add(move.move_id)
                self._run(move)
        return idl.MovePartitionsReply(state=self._state_of(move), error=self._error_of(move))

    def _is_over(self, move: Move) -> bool:
        """Return whether the log has forgotten the move: it, or a later one, has taken the partitions."""
        return self._shard.partitions.has_left(move)

    def _error_of(self, move: Move) -> str | None:
        report = self._reports.get(move.move_id)
        return None if report is None else report.error

    def _state_of(self, move: Move) -> int:
        progress = self._shard.partitions.moves.find_same(move)
        if progress is None and self._is_over(move):
            return int(idl.MoveState.DONE)
        if progress is not None and progress.step is MoveStep.ACTIVATE and move.move_id in self._ended:
            return int(idl.MoveState.DONE)
        is_running = move.move_id in self._running or (progress is not None and progress.step is not MoveStep.PURGE)
        return int(idl.MoveState.UNDER_WAY if is_running else idl.MoveState.UNKNOWN)

    def _run(self, move: Move) -> None:
        if move.move_id in self._running:
            return
        while len(self._reports) >= _MAX_REPORTS and (old := next(iter(self._reports))) not in self._running:
            del self._reports[old], self._moves[old]
        self._moves[move.move_id], self._reports[move.move_id] = move, MoveReport()
        task = asyncio.create_task(self._run_guarded(move), name=f"headrace-move-{move.move_id}")
        self._running[move.move_id] = task

    async def _run_guarded(self, move: Move) -> None:
        report = self._reports[move.move_id]
        try:
            async with self._turns:
                await self._run_to_end(move, report)
        except HeadraceError as exc:
            report.phase, report.error = "ended", str(exc)
            fact(_log, logging.ERROR, "a move of partitions has ended", move=move.move_id, error=str(exc))
        except Exception as exc:
            report.phase, report.error = "ended", f"{type(exc).__name__}: {exc}"
            _log.error("move %s has ended by a bug", move.move_id, exc_info=exc)
        finally:
            del self._running[move.move_id]
            self._shard.aborts.discard(move.move_id)

    async def _run_to_end(self, move: Move, report: MoveReport) -> None:
        """Run a move until it is over; raise why it was never begun, or was given up."""
        backoff = Backoff(min_s=_FIRST_PAUSE_S, max_s=_LONGEST_PAUSE_S, random=random.random)
        why_given_up = "somebody has asked for that"
        while True:
            began_s = self._clock_s()
            try:
                if await self._run_once(move, report):
                    self._ended.add(move.move_id)
                    report.phase, report.error = "done", None
                    fact(_log, logging.INFO, "partitions have moved here", move=move.move_id, source=move.source)
                else:
                    report.phase, report.error = "given up", why_given_up
                    fact(_log, logging.WARNING, "a move was given up", move=move.move_id, source=move.source)
                return
            except (CorruptionError, RequestError) as exc:
                progress = self._shard.partitions.moves.find_same(move)
                if progress is None or progress.step is MoveStep.PURGE:
                    raise
                if isinstance(exc, RequestError) and progress.step is MoveStep.COPY:
                    self._shard.aborts.add(move.move_id)  # it cannot go on; the source may have released all the same
                    why_given_up = str(exc)
                report.error = str(exc)
            except HeadraceError as exc:
                report.error = str(exc)
            if self._clock_s() - began_s > _LONGEST_PAUSE_S:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _run_once(self, move: Move, report: MoveReport) -> bool:
        progress = self._shard.partitions.moves.find_same(move)
        if progress is None and self._shard.is_aborted(move):
            return False  # the source has not heard of it, or has only copied
        async with RemoteSource(self._nodes, self._server_id, move, report) as source:
            is_activated = progress is not None and progress.step is MoveStep.ACTIVATE
            if is_activated and await source.is_purged():
                return True
            return await DestinationMove(move, self._shard, source).run()

    # As a source.

    async def step_move(self, request: Any) -> Any:
        """Answer an `idl.StepMoveRequest`. Cancellation: the step is taken or not; repeating it finds out.

        Raises:
            RequestError: This is not the move's source, or it cannot take the step.
        """
        move = self._heard_of(request)
        source, reply = self._source, idl.StepMoveReply(is_done=True)
        match request.step:
            case idl.SourceStep.DIGEST:
                position, reply.digest = await source.digest(move)
                reply.position = position_to_idl(position)
            case idl.SourceStep.SEAL:
                sealed = await source.seal(move)
                reply.is_done = sealed is not None
                reply.position = None if sealed is None else position_to_idl(sealed)
            case idl.SourceStep.UNSEAL:
                reply.is_done = await source.unseal(move)
            case idl.SourceStep.RELEASE:
                reply.is_done = await source.release(move, position_from_idl(request.position))
            case idl.SourceStep.PURGE:
                await source.purge(move)
                await self._shard.purge_left()  # another request's purge may be under way, or have failed
            case idl.SourceStep.LOOK:
                reply.is_done = self._is_purged(move)
            case _:
                raise RequestError(f"there is no step {request.step} of a move")
        if request.step in (idl.SourceStep.UNSEAL, idl.SourceStep.PURGE):
            self._shard.let_log_go(move)
        return reply

    def _is_purged(self, move: Move) -> bool:
        partitions = self._shard.partitions
        progress = partitions.moves.find_same(move)
        if progress is None:
            return partitions.has_left(move) and not partitions.is_set_back(move)
        return progress.step is MoveStep.PURGE and move.move_id not in partitions.moves.unpurged

    async def copy_partitions(self, request: Any) -> Any:
        """Answer an `idl.CopyPartitionsRequest`. Cancellation: repeat it.

        Raises:
            GoneError: The copy has ended; another one is to be begun.
            RequestError: As `MoveSource.copy`.
        """
        move, copy_id = self._heard_of(request), request.copy_id
        if not copy_id:
            if request.chunk:
                raise GoneError(f"move {move.move_id!r}: a copy begins with chunk 0, not {request.chunk}")
            copy_id = (await self._source.copy(move)).contents.copy_id
        opened, chunk = await self._shard.chunk(move, copy_id, request.chunk)
        return idl.CopyPartitionsReply(
            copy_id=copy_id,
            position=position_to_idl(opened.position),
            data=chunk.data,
            num_rows=chunk.num_rows,
            is_last=chunk.is_last,
        )

    async def follow_partitions(self, request: Any) -> Any:
        """Answer an `idl.FollowPartitionsRequest`. Cancellation: harmless. Raises `RequestError`."""
        after = position_from_idl(request.after)
        tail = await self._source.follow(self._heard_of(request), after, request.up_to_seq)
        if tail is None:
            return idl.FollowPartitionsReply(records=[], position=request.after, is_lost=True)
        records = [
            idl.FollowedRecord(
                position=position_to_idl(each.position),
                epoch=each.epoch,
                header=pack_header(dict(each.header)),
                body=each.body,
            )
            for each in tail.records
        ]
        return idl.FollowPartitionsReply(records=records, position=position_to_idl(tail.position), is_lost=False)

    def _heard_of(self, request: Any) -> Move:
        move = self._checked(request, at_source=True)
        self._heard_s[move.move_id] = self._clock_s()
        return move

    def _checked(self, request: Any, *, at_source: bool) -> Move:
        if request.server_id != self._server_id:
            raise RequestError(f"this is a shard of server {self._server_id}, not of {request.server_id}")
        move = move_from_idl(request.move)
        if (move.source if at_source else move.destination) != self._number:
            raise RequestError(f"move {move.move_id!r} from shard {move.source} to {move.destination}: not this shard")
        if move.partitions[-1] >= self._shard.partitions.known.num_partitions:
            raise RequestError(f"move {move.move_id!r}: there is no partition {move.partitions[-1]}")
        return move

    async def _keep(self) -> NoReturn:
        """Let seals lapse whose destinations are silent, and end copies that nobody reads."""
        started_s = self._clock_s()
        while True:
            await asyncio.sleep(_LOOK_S)
            now_s = self._clock_s()
            open_ids = set()
            for each in self._shard.partitions.moves:
                if each.step is MoveStep.SEAL:
                    open_ids.add(each.move.move_id)
                    if now_s - max(self._heard_s.get(each.move.move_id, 0.0), started_s) >= _SILENCE_S:
                        await self._guarded(partial(self._source.expire, each.move))
            self._heard_s = {
                move_id: heard_s
                for move_id, heard_s in self._heard_s.items()
                if move_id in open_ids or now_s - heard_s < _SILENCE_S
            }
            await self._guarded(self._shard.close_idle)

    async def _purge_left(self) -> NoReturn:
        """Remove the rows that purges have left which failed, or were cut off by the end of the process."""
        while True:
            await self._guarded(self._shard.purge_left)
            await asyncio.sleep(_LONGEST_PAUSE_S)

    async def _guarded(self, work: Callable[[], Any]) -> bool:
        """Return whether work has succeeded."""
        try:
            await work()
        except HeadraceError as exc:  # a disk that fails ends the shard elsewhere
            fact(_log, logging.WARNING, "work of moves has failed; it is tried again", error=str(exc))
            return False
        return True

    # For people and plans.

    async def measure(self) -> tuple[float, float]:
        """As `PartitionContents.measure`."""
        return await self._shard.measure()

    def status(self) -> list[Any]:
        """Return an `idl.MoveStatus` of each move that is not over, and of those that were given up since the start."""
        found = {
            each.move.move_id: (each.move, str(each.step)) for each in self._shard.partitions.moves if each.is_open
        }
        for move_id, report in self._reports.items():
            if move_id in self._running or report.error is not None:
                progress = self._shard.partitions.moves.find(move_id)
                found[move_id] = self._moves[move_id], "" if progress is None else str(progress.step)
        return [self._status_of(move, step) for move, step in found.values()]

    def _status_of(self, move: Move, step: str) -> Any:
        status = idl.MoveStatus(
            move_id=move.move_id,
            source=move.source,
            destination=move.destination,
            num_partitions=len(move.partitions),
            step=step,
        )
        if (report := self._reports.get(move.move_id)) is not None:
            status.phase, status.error = report.phase, report.error
            status.copied_bytes, status.copied_rows = report.copied_bytes, report.copied_rows
            status.records_behind = report.records_behind
        return status
