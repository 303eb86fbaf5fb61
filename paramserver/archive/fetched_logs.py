"""The archived logs of a server, fetched into a directory to be read there, such as by a replay."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from headrace.paramserver.archive.objects import Piece, ShardArchive, chain_of, check_history, num_shards_of
from headrace.paramserver.log.excerpt import write_excerpt
from headrace.paramserver.snapshots.bucket import SnapshotStore
from headrace.paramserver.system.limits import check_room
from headrace.paramserver.system.object_store import ObjectStore
from headrace.schemas.errors import ConfigError, GoneError
from headrace.schemas.snapshot_manifest import shard_folder
from headrace.schemas.tables import TableSpec

__all__ = ["FetchedLogs", "fetch_logs", "write_chain"]

_SEGMENTS_AT_ONCE = 4

_Progress = Callable[[int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchedLogs:
    """What was fetched.

    Attributes:
        tables: The server's at its newest snapshot: a log need not begin with the records that registered them.
        gaps: One line for each shard whose archive lacks records before those that were fetched.
    """

    tables: tuple[TableSpec, ...]
    gaps: tuple[str, ...]


def fetch_logs(
    store: ObjectStore,
    target: Path,
    *,
    shards: Collection[int] | None = None,
    from_seq: int | None = None,
    to_seq: int | None = None,
    on_size: Callable[[int], None] = lambda _: None,
    on_progress: _Progress = lambda _: None,
) -> FetchedLogs:
    """Fetch the archived logs of a server, or of some of its shards, laid out as in a server's directory.

    Of a log with gaps, what lies behind the last one is fetched, or around `from_seq`: earlier records say what tables
    there were.

    Args:
        store: The prefix of one server.
        target: An empty directory.
        shards: Which; None takes all.
        from_seq: First record that is wanted; earlier ones come too.
        to_seq: Last record that is wanted.
        on_size: Called once with the bytes that are to be fetched.
        on_progress: Called with the bytes fetched since its last call, from threads.

    Raises:
        ConfigError: There is no archive, or no such shard.
        GoneError: `from_seq` is not in the archive.
        CorruptionError: An object is damaged or missing.
        StorageError: The disk failed or lacks room.
        UnavailableError: The store is away.

    Thread: any without an event loop; it blocks.
    """
    try:
        num_shards = num_shards_of(store)
    except GoneError as exc:
        raise ConfigError(f"{store.where}: no server archives its log here") from exc
    wanted = sorted(range(num_shards) if shards is None else set(shards))
    if wanted and not 0 <= wanted[0] <= wanted[-1] < num_shards:
        raise ConfigError(f"--shard {wanted[-1]}: the server at {store.where} has shards 0 to {num_shards - 1}")
    if len(wanted) != 1 and (from_seq is not None or to_seq is not None):
        raise ConfigError(
            f"--from-seq and --to-seq count in one shard's log, and {store.where} has more: give --shard N"
        )
    chains, gaps = {}, []
    for shard in wanted:
        pieces = ShardArchive(store, shard).pieces()
        check_history(pieces, store.where)
        runs = _runs_of(pieces)
        if from_seq is not None:
            runs = [run for run in runs if run[0].segment.first_seq <= from_seq <= run[-1].last_seq]
            if pieces and not runs:
                held = f"{pieces[0].segment.first_seq} to {max(piece.last_seq for piece in pieces)}"
                raise GoneError(f"{store.where}: shard {shard}: seq {from_seq} is not in the archive, of {held}")
        elif len(runs) > 1:
            first = runs[-1][0].segment.first_seq
            gaps.append(f"shard {shard}: the archive has a gap; records before {first} are not sent")
        chain = runs[-1] if runs else []
        chains[shard] = [piece for piece in chain if to_seq is None or piece.segment.first_seq <= to_seq]
    if not any(chains.values()):
        raise ConfigError(f"{store.where}: the archive has no records yet")
    size_bytes = sum(piece.segment.content.size_bytes for chain in chains.values() for piece in chain)
    check_room(target, size_bytes, what="the archived log")
    on_size(size_bytes)
    for shard, chain in chains.items():
        if chain:
            path = target / shard_folder(shard) / "log"
            path.mkdir(parents=True)
            write_chain(ShardArchive(store, shard), chain, path, last_seq=chain[-1].last_seq, on_progress=on_progress)
    newest = SnapshotStore(store).newest()
    tables = () if newest is None else newest.parts[0].tables
    return FetchedLogs(tables=tables, gaps=tuple(gaps))


def write_chain(
    archive: ShardArchive, chain: Sequence[Piece], log_path: Path, *, last_seq: int, on_progress: _Progress
) -> int:
    """Fetch pieces that follow each other into a log's empty directory, up to a record; return the highest epoch.

    Raises as `fetch_logs`.
    """

    def write(number: int) -> int:
        segment = chain[number].segment
        following = chain[number + 1].segment.first_seq - 1 if number + 1 < len(chain) else last_seq

        def chunks() -> Iterator[memoryview]:
            for chunk in archive.read(segment):
                on_progress(len(chunk))
                yield chunk

        return write_excerpt(log_path, segment.first_seq, chunks(), last_seq=min(chain[number].last_seq, following))

    with ThreadPoolExecutor(_SEGMENTS_AT_ONCE, "headrace-restore") as pool:
        return max(pool.map(write, range(len(chain))), default=0)


def _runs_of(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Return the pieces between gaps, in order."""
    runs: list[list[Piece]] = []
    begin = pieces[0].segment.first_seq if pieces else None
    while begin is not None:
        runs.append(chain_of(pieces, begin))
        end = runs[-1][-1].last_seq
        begin = next((p.segment.first_seq for p in pieces if p.segment.first_seq > end + 1), None)
    return runs
