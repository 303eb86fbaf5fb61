"""The command `headrace log inspect`: what it prints, and its exit codes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from command_line import CommandLine

from headrace.paramserver.log.files import FileUpdateLog
from headrace.paramserver.log.interface import UpdateLogConfig


async def _fill(path: Path) -> None:
    log = FileUpdateLog.open(path, config=UpdateLogConfig(segment_bytes=4096, allocate_bytes=4096))
    appends = [
        log.append(epoch=2, header={"step": 40 + seq, "time_us": 1_700_000_000_000_000}, body=[bytes(300)])
        for seq in range(1, 31)
    ]
    await asyncio.gather(*(append.durable for append in appends))
    await log.close()


@pytest.fixture
def server_dir(tmp_path: Path) -> Path:
    """The directory of a server with two shards that stand still."""
    for shard in range(2):
        asyncio.run(_fill(tmp_path / f"shard-{shard:04d}" / "log"))
    return tmp_path


def test_table_shows_ranges_and_verdict(server_dir: Path, run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each log is a table, uncut on a terminal of 80 columns, with its segments' ranges, and the verdict in a line."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    out = run("log", "inspect", server_dir)
    assert out.count("30 records") == 2
    assert out.count("all checksums are right") == 2
    assert "…" not in out.replace(str(server_dir), "")
    for words in ("seqs", "records", "1–", "41–", " KiB ", "2023-11-14", "22:13:20", "sealed"):
        assert words in out


def test_a_pipe_gets_each_row_in_one_line(server_dir: Path, run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the width of the terminal, a program can read a row of a table from one line."""
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    lines = run("log", "inspect", server_dir).splitlines()
    assert [line for line in lines if "2023-11-14 22:13:20" in line and line.split()[-1] == "sealed"]
    assert not [line for line in lines if line.strip() == "sealed"]


def test_json_is_one_object(server_dir: Path, run: CommandLine) -> None:
    """`--json` prints one object with every segment of every log, and nothing else."""
    (log,) = run.json("log", "inspect", server_dir / "shard-0001")["logs"]
    assert run.err == ""
    assert log["is_whole"] is True
    assert log["segments"][0]["first_seq"] == 1
    assert log["segments"][0]["steps"][0] == 41
    assert log["segments"][-1]["last_seq"] == 30
    assert sum(segment["num_records"] for segment in log["segments"]) == 30


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_damage_is_shown_and_exits_1(server_dir: Path, options: tuple[str, ...], run: CommandLine) -> None:
    """Damage is in the output, the first of it with file and offset is the line on stderr, and the exit code is 1."""
    segment = min((server_dir / "shard-0001" / "log").glob("*.hrlog"))
    data = bytearray(segment.read_bytes())
    data[200] ^= 1
    data[800] ^= 1
    segment.write_bytes(data)
    out = run("log", "inspect", server_dir, *options, code=1)
    assert run.err.startswith(f"headrace: error: {segment}: damaged at offset 64: the checksum of record 1")
    assert run.err.endswith("; and 1 more\n")
    assert out.count("checksum of record") == (2 if not options else 4)
    if options:
        whole, damaged = json.loads(out)["logs"]
        assert (whole["is_whole"], damaged["is_whole"]) == (True, False)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("inspect", "nowhere"), 1, "nowhere: not a directory"),
        (("inspect", "."), 1, "holds no update log; name the directory of a server, of a shard or of its log"),
        (("inspect",), 2, "DIR"),
        (("repair", "."), 2, "repair"),
    ],
)
def test_mistake_is_one_line(
    arguments: tuple[str, ...],
    code: int,
    words: str,
    tmp_path: Path,
    run: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrong directory or word is one line on stderr."""
    monkeypatch.chdir(tmp_path)
    assert words in run.refused("log", *arguments, code=code)
