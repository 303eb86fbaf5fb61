"""`headrace verify` against real servers: equal ones, different ones, and saved digests."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from command_line import CommandLine
from held_ports import hold_ports
from hellos import hello_of_writer
from set_embeddings import delta_of, request_of

from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.system import durable
from headrace.schemas.errors import RequestError
from headrace.schemas.idl import idl
from headrace.schemas.row_digest import digest_rows
from headrace.schemas.tables import ColumnShard, DType, StateKind, StateSpec, TableSpec
from headrace.scripts.commands.terminal import ProgressBar

SPEC = TableSpec(
    fqn="items.weight",
    num_rows=300_000,
    dim=6,
    dtype=DType.FLOAT32,
    states=(
        StateSpec(name="exp_avg", kind=StateKind.POINTWISE, dtype=DType.FLOAT16),
        StateSpec(name="sum", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1),
    ),
)
IDS = np.unique(np.random.default_rng(0).integers(0, 300_000, 9000))


def values(ids: np.ndarray, columns: ColumnShard) -> dict[str, np.ndarray]:
    """Return the same values for the same rows."""
    whole = (ids[:, None] % 1000 * 10 + np.arange(6)).astype("<f4")
    weights = whole[:, columns.offset : columns.offset + columns.width]
    return {"weights": weights, "exp_avg": (weights / 7).astype("<f2"), "sum": ids[:, None].astype("<f4")}


async def write(
    address: str,
    ids: np.ndarray,
    columns: ColumnShard,
    *,
    client: str = "rank0",
    deleted: tuple[int, ...] = (),
    spec: TableSpec = SPEC,
) -> None:
    """Write rows of some columns to a server of one shard."""
    made = values(ids, columns)
    gone = np.array(deleted, "<i8") if deleted else None
    delta = delta_of(spec, ids, made["weights"], states=made, shard=columns, deleted_row_ids=gone)
    async with await ParamServerClient.connect(*parse_address(address, default_port=0)) as writer:
        await writer.hello(hello_of_writer(spec, client=client))
        await writer.set_embeddings(request_of(delta, client=client))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Two servers with the same rows, one of them in column shards, and a third with one row less and another one."""
    folder = tmp_path_factory.mktemp("verify")
    with (
        ServerProcess.start(folder / "whole", shards=1) as whole,
        ServerProcess.start(folder / "split", shards=1) as split,
        ServerProcess.start(folder / "other", shards=1) as other,
    ):
        asyncio.run(write(whole.address, IDS, SPEC.whole, deleted=(299_999,)))
        asyncio.run(write(split.address, IDS, ColumnShard(offset=0, width=4)))
        asyncio.run(write(split.address, IDS, ColumnShard(offset=4, width=2), client="rank1"))
        asyncio.run(write(other.address, np.append(IDS[1:], 299_998), SPEC.whole))
        yield [whole.address, split.address, other.address]


async def test_digests_are_those_of_the_rows(servers: list[str]) -> None:
    """The server's digest is that of the rows written, deleted ones left out, whatever column shards they came in."""
    made = values(IDS, SPEC.whole)
    expected = int(digest_rows(IDS, [made["weights"], made["exp_avg"], made["sum"]]).sum())
    for address in servers[:2]:
        async with await EmbeddingReader.connect(address) as reader:
            digest = await reader.digest(SPEC.fqn, with_presence=True)
            assert (digest.num_rows, digest.total) == (IDS.size, expected)
            assert digest.is_steady
            present = np.concatenate([digest.present_rows(bucket) for bucket in sorted(digest.buckets)])
            assert np.array_equal(present, IDS)


async def test_parts_of_rows_and_columns(servers: list[str]) -> None:
    """A digest of some columns is that of a trainer that has these, and ranges of rows add up to all."""
    part = ColumnShard(offset=4, width=2)
    made = values(IDS, part)
    expected = int(digest_rows(IDS, [made["weights"], made["exp_avg"]]).sum())
    for address in servers[:2]:
        async with await EmbeddingReader.connect(address) as reader:
            assert (await reader.digest(SPEC.fqn, columns=part)).total == expected
            ends = [0, 1, 65_536, 100_000, 300_000]
            parts = [
                await reader.digest(SPEC.fqn, columns=part, first_row=first, end_row=end)
                for first, end in itertools.pairwise(ends)
            ]
            assert sum(digest.total for digest in parts) % 2**64 == expected
            assert sum(digest.num_rows for digest in parts) == IDS.size


async def test_replies_are_bounded(servers: list[str]) -> None:
    """A shard sends as many buckets as are asked for, and says where to go on."""
    async with await ParamServerClient.connect(*parse_address(servers[1], default_port=0)) as client:
        buckets, first_row = [], 0
        while first_row < 300_000:
            request = idl.DigestRowsRequest(
                fqn=SPEC.fqn,
                first_row=first_row,
                end_row=2**63 - 1,
                column_offset=0,
                width=6,
                max_buckets=1,
                with_presence=False,
            )
            reply = await client.digest_rows(request)
            buckets += np.frombuffer(reply.buckets, "<i8").tolist()
            assert reply.next_row > first_row
            first_row = reply.next_row
        assert buckets == [0, 1, 2, 3, 4]
        request.width = 7
        with pytest.raises(RequestError, match="6 columns"):
            await client.digest_rows(request)
        request.width, request.max_buckets = 6, 0
        with pytest.raises(RequestError, match="out of range"):
            await client.digest_rows(request)


def test_equal_servers(servers: list[str], run: CommandLine) -> None:
    """Two servers with the same rows are equal, however the rows were sharded: exit code 0."""
    out = run("verify", "--server", servers[0], "--against", servers[1])
    assert f"items.weight: {IDS.size:,} rows" in out and "; equal" in out
    assert f"{IDS.size:,} rows of 1 table, equal, in " in out


def test_different_servers(servers: list[str], run: CommandLine) -> None:
    """Rows that one server lacks are named: exit code 1."""
    (table,) = run.json("verify", "--server", servers[0], "--against", servers[2], code=1)["tables"]
    assert table["differing_buckets"] == [0, 4]
    assert table["differing_row_ids"] == [int(IDS[0]), 299_998]


def test_saved_digests(servers: list[str], tmp_path: Path, run: CommandLine) -> None:
    """Saved digests compare with a server later; a file that is none is refused in one line."""
    file = tmp_path / "digests.json"
    run("verify", "--server", servers[0], "--save", file)
    run("verify", "--server", servers[1], "--against", file)
    out = run("verify", "--server", servers[2], "--against", file, code=1)
    assert "DIFFERENT in 2 buckets: rows 0–65535, 262144–327679" in out
    assert "rows of 1 table, 1 of them DIFFERENT, in " in out
    for text in ("[]", "[" * 100_000):
        file.write_text(text)
        assert "no file that --save has made" in run.refused("verify", "--server", servers[0], "--against", file)
    line = run.refused("verify", "--server", servers[0], "--table", SPEC.fqn[:-1])
    assert f"--table {SPEC.fqn[:-1]!r}: no such table here; the nearest is {SPEC.fqn!r}" in line
    assert "--model 'defualt': has no tables here" in run.refused(
        "verify", "--server", servers[0], "--model", "defualt"
    )


def test_digests_are_saved_whole_or_not_at_all(
    servers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: CommandLine
) -> None:
    """A full disk leaves the digests that were saved before; a link is followed, a device is written to."""
    file, link = tmp_path / "digests.json", tmp_path / "link"
    link.symlink_to(file)
    run("verify", "--server", servers[0], "--save", link)
    before = file.read_bytes()
    assert link.is_symlink()
    run("verify", "--server", servers[2], "--save", "/dev/null")

    def fail(_: int) -> None:
        assert file.read_bytes() == before and (tmp_path / "digests.json.new").read_bytes() != before
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable.os, "fsync", fail)
    out = run("verify", "--server", servers[2], "--save", link, code=1)
    assert f"--save {link}: No space left on device" in run.err and SPEC.fqn in out
    assert file.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digests.json", "link"]


def test_a_place_that_cannot_be_written_is_told_first(tmp_path: Path, run: CommandLine) -> None:
    """Nobody waits for all rows to hear of a wrong `--save`; here there is not even a server."""
    place = tmp_path / "gone" / "x"
    line = run.refused("verify", "--server", f"127.0.0.1:{hold_ports()}", "--save", place)
    assert f"--save {place}: cannot be written" in line


def test_digests_are_written_to_a_pipe(servers: list[str], tmp_path: Path, run: CommandLine) -> None:
    """A shell's `>(…)` and a piped `/dev/stdout` are names in /proc that lead to no file."""
    end, other_end = os.pipe()
    with open(end, encoding="utf-8") as pipe:
        try:
            run("verify", "--server", servers[0], "--save", f"/dev/fd/{other_end}")
        finally:
            os.close(other_end)
        (tmp_path / "digests.json").write_text(pipe.read())
    run("verify", "--server", servers[1], "--against", tmp_path / "digests.json")


def test_the_deadline_is_for_an_answer_and_not_for_all(
    servers: list[str], monkeypatch: pytest.MonkeyPatch, run: CommandLine
) -> None:
    """A store of any size gets its time as long as it gets on, and how far it is is shown."""
    shown: list[tuple[int, int]] = []
    monkeypatch.setattr(ProgressBar, "update", lambda _, *at: shown.append(at))
    rescheduled: list[float | None] = []
    reschedule = asyncio.Timeout.reschedule
    monkeypatch.setattr(
        asyncio.Timeout, "reschedule", lambda self, when: (rescheduled.append(when), reschedule(self, when))[1]
    )
    run("verify", "--server", servers[0], "--against", servers[1], "--timeout-s", 5000)
    assert shown[-1][0] == 2 * IDS.size and all(done <= total for done, total in shown)
    assert len([when for when in rescheduled if when and when > time.monotonic() + 4000]) >= len(shown)

    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(EmbeddingReader, "digest", never)
    line = run.refused("verify", "--server", servers[0], "--timeout-s", 0.2)
    assert "nothing has come for 0.2 s: give it more with --timeout-s" in line


def test_a_server_that_is_not_there(servers: list[str], run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said at once, in one line, and of `--against` what it was taken for."""
    run.refused("verify", "--server", "127.0.0.1:1")
    line = run.refused("verify", "--server", servers[0], "--against", "127.0.0.1:1")
    assert "--against 127.0.0.1:1: no connection to 127.0.0.1:1: Connection refused" in line
    line = run.refused("verify", "--server", servers[0], "--against", servers[0])  # as one leads that was handed over
    assert f"--against {servers[0]}: leads to {servers[0]}, as --server does" in line

    def resolve(*_: object, **__: object) -> NoReturn:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)  # a real one may take longer than anybody waits
    for name in ("no-such-file.invalid", "no/such/file"):
        line = run.refused("verify", "--server", servers[0], "--against", name)
        assert f"--against {name}: no such file, nor a server of that name" in line
