"""The command `headrace demo`, whole: server, trainer, reader, comparison; and what is left when it is stopped."""

from __future__ import annotations

import gzip
import json
import os
import select
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_line import CommandLine

from headrace.scripts.commands import demo as demo_module
from headrace.scripts.ranking_demo.events import SAMPLE

MARKER = "HEADRACE_DEMO_TEST"


@pytest.fixture(autouse=True)
def _temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary files go where the test can see what is left, and child processes carry a mark."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)  # it is remembered; `monkeypatch` gives it back
    monkeypatch.setenv(MARKER, uuid.uuid4().hex)


def marked_processes() -> list[psutil.Process]:
    """Return the living processes that descend from this test's, whoever adopted them."""
    found = []
    for process in psutil.process_iter():
        try:
            is_ours = process.environ().get(MARKER) == os.environ[MARKER]
            if is_ours and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def files_left(tmp_path: Path) -> list[str]:
    """Return the names of our temporary files; torch leaves an empty cache folder of its own."""
    return [path.name for path in (tmp_path / "tmp").iterdir() if "torch" not in path.name]


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "headrace", "demo", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.torchrec
@pytest.mark.timeout(300)  # five processes that load torch
def test_demo_finds_every_row_equal(tmp_path: Path) -> None:
    """The command trains, streams, serves and compares, ends with 0, and leaves a report, a plot and nothing else."""
    out = tmp_path / "out" / "deep"
    process = start("--out", str(out), "--max-events", "2000", "--shards", "3")
    stdout, stderr = process.communicate(timeout=280)
    assert process.returncode == 0, stderr
    assert stdout.count(" 0 different") == 3
    assert "Traceback" not in stderr
    assert "Warning" not in stderr
    assert sorted(path.name for path in out.iterdir()) == ["hit-rate.png", "report.json"]
    report = json.loads((out / "report.json").read_text())
    assert report["num_events"] == 2000
    assert report["num_rows_compared"] == report["num_users"] + report["num_items"]
    assert report["num_rows_different"] == report["num_replica_rows_different"] == report["num_missing_rows"] == 0
    assert report["num_answers_compared"] > 0 == report["num_answers_different"]
    assert report["num_rows_streamed"] > 2000
    assert 0 < report["ack_lag"]["p50_ms"] <= report["ack_lag"]["p99_ms"]
    assert report["arrival_lag"]["count"] == report["num_batches"]
    # Better than by chance, one in ten. How much of it the streamed copy keeps depends on the machine.
    assert report["hit_rate"]["live"] > 0.25
    assert marked_processes() == []
    assert files_left(tmp_path) == []


@pytest.mark.torchrec
@pytest.mark.timeout(300)  # five processes that load torch
@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_stopped_demo_leaves_nothing_behind(tmp_path: Path, number: signal.Signals, exit_code: int) -> None:
    """Ctrl-C, also an impatient one, and SIGTERM end all processes and remove all files; SIGKILL ends all processes."""
    process = start("--out", str(tmp_path / "out"))
    try:
        assert process.stderr is not None
        assert any("training, streaming and serving" in line for line in process.stderr)
        processes = psutil.Process(process.pid).children(recursive=True)
        assert len(processes) == 4  # the reader, the supervisor and two shards
        pid_fds = [os.pidfd_open(child.pid) for child in processes]
        process.send_signal(number)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == exit_code
    assert "Traceback" not in stderr
    for fd in pid_fds:  # not our children; a zombie has ended
        readable, _, _ = select.select([fd], [], [], 60)
        os.close(fd)
        assert readable, "a process of the demo still runs"
    assert marked_processes() == []
    if number != signal.SIGKILL:  # nobody is there to do it
        assert files_left(tmp_path) == []


@pytest.mark.torchrec
@pytest.mark.timeout(300)  # five processes that load torch
def test_one_flipped_bit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: CommandLine) -> None:
    """When one bit of one row of the trainer is another than server's and replica's, both are told; it ends with 1."""
    import torch

    from headrace.scripts.ranking_demo import training

    compare = training.compare_with_store

    def flip_and_compare(tables: Any, address: str) -> Any:
        tables[0].weights()[7].view(dtype=torch.int32)[3] ^= 1
        return compare(tables, address)

    monkeypatch.setattr(training, "compare_with_store", flip_and_compare)
    sizes = ("--max-events", 500, "--batch-events", 50, "--shards", 1)
    assert run("demo", "--out", tmp_path / "out", *sizes, code=1).count(" 1 different") == 2
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["num_rows_different"] == report["num_replica_rows_different"] == 1
    for where in ("server", "replica"):
        told = f"headrace: error: 1 of {report['num_rows_compared']} rows differ between trainer and {where}"
        assert told in run.err
    assert marked_processes() == []


@pytest.mark.torchrec
def test_unusable_settings_are_refused(tmp_path: Path, run: CommandLine) -> None:
    """Too few events, an unusable folder and a malformed or absent log are one line each, and nothing is made."""
    out = tmp_path / "out"
    assert run.refused("demo", "--max-events", 1000, "--batch-events", 128, "--out", out) == (
        f"headrace: error: {SAMPLE}: 1000 events in 8 batches of 128; the demo needs 10 batches or more: "
        "a smaller --batch-events, or more --events or --max-events\n"
    )
    (tmp_path / "file").touch()
    line = run.refused("demo", "--out", tmp_path / "file" / "out")
    assert line == f"headrace: error: --out {tmp_path / 'file' / 'out'}: Not a directory\n"
    log = tmp_path / "log.csv.gz"
    log.write_bytes(gzip.compress(gzip.decompress(SAMPLE.read_bytes())[:5000] + b"\n1,two,3\n"))
    line = run.refused("demo", "--events", log, "--out", out)
    assert line.startswith(f"headrace: error: {log}:") and not out.exists()
    line = run.refused("demo", "--events", tmp_path / "absent.csv", "--out", out)
    assert line == f"headrace: error: {tmp_path / 'absent.csv'}: No such file or directory\n"
    run.refused("demo", "--shards", 0, "--out", out, code=2)


def test_missing_extra_is_told_in_one_line(tmp_path: Path, run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TorchRec the demo says what to install, and makes nothing."""
    find_spec = demo_module.importlib.util.find_spec
    monkeypatch.setattr(
        demo_module.importlib.util, "find_spec", lambda name: None if name == "torchrec" else find_spec(name)
    )
    monkeypatch.setattr(demo_module, "_EXTRA_MODULES", ("torchrec",))
    line = run.refused("demo", "--out", tmp_path / "out")
    assert "`headrace demo` needs torchrec, which is not installed: pip install '" in line
    assert not (tmp_path / "out").exists()


def test_help_loads_no_torch() -> None:
    """`headrace demo --help` is there at once."""
    code = (
        "import sys\nfrom headrace.cli import main\nassert main(['demo', '--help']) == 0\n"
        "assert not {'torch', 'matplotlib', 'rocksdict'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "--events" in done.stdout
