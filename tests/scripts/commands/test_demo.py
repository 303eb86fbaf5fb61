"""The command `headrace demo`, whole: server, trainer, reader, comparison; and what is left when it is stopped."""

from __future__ import annotations

import os
import re
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
    """The command trains, streams, serves and compares, ends with 0, and leaves nothing."""
    process = start("--max-events", "2000", "--shards", "3")
    stdout, stderr = process.communicate(timeout=280)
    assert process.returncode == 0, stderr
    assert stdout.count(" 0 different") == 3
    assert "Traceback" not in stderr
    assert "Warning" not in stderr
    rates = {copy: float(rate) for copy, rate in re.findall(r"hit@10, (\w+) \w+ +([\d.]+)%", stdout)}
    # Better than by chance, one in ten. How much of it the served model keeps depends on the machine.
    assert rates.keys() == {"served", "frozen", "live"} and rates["live"] > 25
    assert marked_processes() == []
    assert files_left(tmp_path) == []


@pytest.mark.torchrec
@pytest.mark.timeout(300)  # five processes that load torch
@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_stopped_demo_leaves_nothing_behind(tmp_path: Path, number: signal.Signals, exit_code: int) -> None:
    """Ctrl-C, also an impatient one, and SIGTERM end all processes and remove all files; SIGKILL ends all processes."""
    process = start()
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
def test_one_flipped_bit_is_found(monkeypatch: pytest.MonkeyPatch, run: CommandLine) -> None:
    """When one bit of one row of the trainer is another than the replica's, that is told, and the demo ends with 1."""
    import torch

    from headrace.streamer import RawEmbeddingStreamer

    audit = RawEmbeddingStreamer.audit

    def audit_and_flip(streamer: RawEmbeddingStreamer) -> Any:  # before, the audit's flush would send the row
        report = audit(streamer)
        streamer.tables[0].weights()[7].view(dtype=torch.int32)[3] ^= 1
        return report

    monkeypatch.setattr(RawEmbeddingStreamer, "audit", audit_and_flip)
    out = run("demo", "--max-events", 500, "--shards", 1, code=1)
    assert out.count(" 1 different") == 1 and out.count(" 0 different") == 2
    assert marked_processes() == []


def test_missing_extra_is_told_in_one_line(run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TorchRec the demo says what to install."""
    find_spec = demo_module.importlib.util.find_spec
    monkeypatch.setattr(
        demo_module.importlib.util, "find_spec", lambda name: None if name == "torchrec" else find_spec(name)
    )
    line = run.refused("demo")
    assert "`headrace demo` needs torchrec, which is not installed: pip install '" in line


def test_help_loads_no_torch() -> None:
    """`headrace demo --help` is there at once."""
    code = (
        "import sys\nfrom headrace.cli import main\nassert main(['demo', '--help']) == 0\n"
        "assert not {'torch', 'rocksdict'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "--max-events" in done.stdout
