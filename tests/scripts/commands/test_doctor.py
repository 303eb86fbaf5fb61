"""`headrace doctor`: each unfit thing is found and told with what to do, and a fit machine is fit."""

from __future__ import annotations

import json
import math
import resource
import socket
import ssl
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import CommandLine
from held_ports import hold_ports
from watched_server import watched_server

from headrace.kernels.runtime import dispatch
from headrace.kernels.runtime.cuda_module import FAMILIES, KernelsUnavailableError
from headrace.paramserver.config.data_dir import DataDir
from headrace.paramserver.config.server_settings import ServerConfig
from headrace.paramserver.observe import problems
from headrace.scripts.commands import doctor as doctor_module
from headrace.scripts.commands.doctor import (
    Finding,
    Level,
    check_clock,
    check_disk,
    check_memory,
    check_mode,
    check_open_files,
    check_ports,
    check_protection,
    check_versions,
)

TLS = Path(__file__).parents[2] / "paramserver" / "tls"
GOOD = {"headrace": "1", "torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}


def _problems(findings: Iterable[Finding]) -> list[str]:
    found = list(findings)
    assert all(finding.advice for finding in found if finding.level is Level.PROBLEM)
    return [finding.text for finding in found if finding.level is Level.PROBLEM]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"torch": None}, None),
        ({"torchrec": None, "fbgemm-gpu-cpu": None}, None),
        ({"fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0"}, None),
        ({"torch": "2.14.0", "torchrec": "1.9.2", "fbgemm-gpu-cpu": "1.9.0"}, None),
        ({"torch": "2.14.0", "torchrec": "1.9.2"}, "fbgemm-gpu-cpu is 1.8.0; torch 2.14.0 goes with 1.9.0"),
        ({"torch": "2.99.0"}, None),
        ({"torch": "2.99.0", "torchrec": None}, "torchrec is missing"),
        ({"torchrec": "1.9.0"}, "torchrec is 1.9.0; torch 2.13.0+cpu goes with 1.8.0"),
        ({"fbgemm-gpu-cpu": None}, "fbgemm-gpu is missing"),
    ],
)
def test_versions_that_do_not_fit(changes: dict[str, str | None], problem: str | None) -> None:
    """A version that does not go with the others is a problem; a package that is not needed is none."""
    found = _problems(check_versions({**GOOD, **changes}.get))
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]


def test_kernels_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU all kernels are compiled; where they cannot be, doctor says what would mend it, and it is no problem."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H1")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    asked: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(dispatch, "gpu_module", lambda *family_and_device: asked.append(family_and_device))
    (finding,) = doctor_module.check_gpu()
    assert finding.level is Level.OK
    assert asked == [(family, torch.device("cuda", 1)) for family in FAMILIES]

    def refuse(family: str, device: torch.device) -> None:
        raise KernelsUnavailableError("no NVRTC: pip install 'headrace[cuda]'")

    monkeypatch.setattr(dispatch, "gpu_module", refuse)
    (finding,) = doctor_module.check_gpu()
    assert finding.level is Level.NOTE
    assert "pip install 'headrace[cuda]'" in finding.text


@pytest.mark.gpu
def test_kernels_for_this_gpu() -> None:
    """Every kernel compiles for the GPU of this machine."""
    assert [finding.level for finding in doctor_module.check_gpu()] == [Level.OK]


def test_open_files() -> None:
    """A limit below what a shard may need is a problem."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert not _problems(check_open_files(1))
    if hard != resource.RLIM_INFINITY:
        assert "the limit is" in _problems(check_open_files(hard))[0]


def test_memory(tmp_path: Path) -> None:
    """What is expected is told, without and with a full cache; the budgets are held against the machine's memory."""
    config = ServerConfig(data=tmp_path, block_cache_bytes=1 << 30)
    (fits,) = check_memory(config, 2, 64 << 30)
    assert fits.level == Level.OK
    assert "2 shards take about 632.0 MiB, and 2.6 GiB once" in fits.text and "at most 9.0 GiB" in fits.text
    assert "8 shards take about 2.5 GiB" in _problems(check_memory(config, 8, 16 << 30))[0]


def test_ports(tmp_path: Path) -> None:
    """A port that somebody has is a problem that names the flag; with our own server in the directory it is none."""
    port = hold_ports()
    with socket.create_server(("127.0.0.1", port)):
        for changes, flag in (({"port": port}, "--port"), ({"port": 0, "metrics_port": port}, "--metrics-port")):
            config = ServerConfig(data=tmp_path / "data", **changes)
            (finding,) = check_ports(config, 1)
            assert finding.level is Level.PROBLEM
            assert flag in finding.advice
        with DataDir.claim(tmp_path / "data", num_shards=1) as claimed:
            claimed.prepare()
            assert not _problems(check_ports(ServerConfig(data=tmp_path / "data", port=port), 1))
    assert not _problems(check_ports(ServerConfig(data=tmp_path / "data", port=port), 1))


def test_certificates_and_token(tmp_path: Path) -> None:
    """A certificate that expires, has expired or does not hold yet, a wrong key and an open token file are problems."""
    files = {"tls_certificate": TLS / "server.pem", "tls_key": TLS / "server.key.pem"}
    config = ServerConfig(data=tmp_path, **files)  # type: ignore[arg-type]
    dates = ssl._ssl._test_decode_cert(str(files["tls_certificate"]))  # type: ignore[attr-defined]
    begins_s, ends_s = (ssl.cert_time_to_seconds(dates[name]) for name in ("notBefore", "notAfter"))
    assert not _problems(check_protection(config, {}, begins_s + 1))
    assert "expires in 9 days" in _problems(check_protection(config, {}, ends_s - 9.5 * 86400))[0]
    assert "has expired" in _problems(check_protection(config, {}, ends_s))[0]
    assert "holds from" in _problems(check_protection(config, {}, begins_s - 1))[0]
    wrong = ServerConfig(data=tmp_path, tls_certificate=files["tls_certificate"], tls_key=TLS / "client.key.pem")
    assert len(_problems(check_protection(wrong, {}))) == 1
    token = tmp_path / "token"
    token.write_text("a-token-of-some-length")
    token.chmod(0o644)
    (text,) = _problems(check_protection(ServerConfig(data=tmp_path, token_file=token), {}))
    assert "a-token-of-some-length" not in text


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volatile or remote file system, too little room and slow syncs are problems; nothing is left behind."""
    config = ServerConfig(data=tmp_path / "not" / "there", log_hold_bytes=1 << 20, log_retention_bytes=1 << 20)
    monkeypatch.setattr(doctor_module, "_SLOW_SYNC_S", math.inf)  # of this disk, which others may use
    mounts = tmp_path / "mounts"
    mounts.write_text("disk / ext4 rw 0 0\n")
    assert not _problems(check_disk(config, 1, mounts))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mounts"]
    for kind, word in (("tmpfs", "gone after a restart"), ("nfs4", "another machine")):
        mounts.write_text(f"disk / ext4 rw 0 0\nother {tmp_path} {kind} rw 0 0\nx {tmp_path}elsewhere ext4 rw 0 0\n")
        assert word in _problems(check_disk(config, 1, mounts))[0]
    mounts.write_text("disk / ext4 rw 0 0\n")
    assert "may take" in _problems(check_disk(ServerConfig(data=tmp_path, log_hold_bytes=1 << 50), 1, mounts))[0]
    monkeypatch.setattr(doctor_module, "_SLOW_SYNC_S", 0.0)
    assert "with its sync takes" in _problems(check_disk(config, 1, mounts))[0]


def test_settings_that_serve_would_refuse(tmp_path: Path, run: CommandLine) -> None:
    """A wrong configuration file is one problem that names the line, and exit code 1."""
    file = tmp_path / "headrace.yml"
    file.write_text(f"data: {tmp_path}/data\nprot: 1\n")
    told = run.json("doctor", "--config", file, code=1)
    assert not told["is_fit"]
    (text,) = [finding["text"] for finding in told["findings"] if finding["level"] == "problem"]
    assert "headrace.yml:2: unknown key 'prot'; did you mean 'port'?" in text


def test_the_server_of_the_environment(tmp_path: Path, run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """HEADRACE_SERVER is asked only where no settings are checked: before the first start it is not there."""
    monkeypatch.setenv("HEADRACE_SERVER", "127.0.0.1:1")
    config = tmp_path / "headrace.yml"
    config.write_text(f"data: {tmp_path / 'data'}\nport: 0\n")
    for arguments in (("--data", tmp_path / "data"), ("--config", config), ("--cluster", tmp_path / "absent")):
        told = run.json("doctor", *arguments, code=None)
        assert "server" not in {finding["subject"] for finding in told["findings"]}
    assert "problem  server: " in run("doctor", code=1)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        ("file", "not a directory"),
        ("foreign", "holds 'photo.jpg' and no headrace.json"),
        ("version", "format version 9"),
        ("shard", "shard-0001: the shard's directory is missing; is its disk mounted?"),
        ("none", None),
        ("new", None),
    ],
)
def test_a_directory_that_serve_would_refuse(tmp_path: Path, spoil: str, says: str | None, run: CommandLine) -> None:
    """What is in the data directory is one finding, in the words of a start, and the directory stays as it was."""
    data, config = tmp_path / "data", tmp_path / "headrace.yml"
    config.write_text(f"data: {data}\nport: 0\n")
    if spoil not in ("file", "foreign", "new"):
        with DataDir.claim(data, num_shards=3) as claimed:
            claimed.prepare()
        (data / "LOCK").unlink()
    if spoil == "file":
        data.touch()
    elif spoil == "foreign":
        data.mkdir()
        (data / "photo.jpg").touch()
    elif spoil == "version":
        manifest = data / "headrace.json"
        manifest.write_text(manifest.read_text().replace('"format_version": 1', '"format_version": 9'))
    elif spoil == "shard":
        (data / "shard-0001").rename(tmp_path / "unmounted")
    before = sorted(tmp_path.rglob("*"))
    told = run.json("doctor", "--config", config, code=None if says is None else 1)
    (finding,) = [finding for finding in told["findings"] if finding["subject"] == "directory"]
    assert sorted(tmp_path.rglob("*")) == before
    assert finding["level"] == ("ok" if says is None else "problem")
    assert (says or ("a start makes it" if spoil == "new" else "holds a store of 3 shards")) in finding["text"]


def test_a_directory_that_others_may_enter(tmp_path: Path, run: CommandLine) -> None:
    """One that was not made by a start may be open: this is a note, and the directory stays as it was."""
    for mode, is_told in ((0o755, True), (0o710, True), (0o700, False)):
        tmp_path.chmod(mode)
        told = [(finding.level, finding.advice) for finding in check_mode(tmp_path)]
        assert told == ([(Level.NOTE, f"chmod 700 {tmp_path}")] if is_told else [])
        assert tmp_path.stat().st_mode & 0o777 == mode
    assert list(check_mode(tmp_path / "none")) == []
    tmp_path.chmod(0o755)
    told = run.json("doctor", "--data", tmp_path, code=None)
    assert "permissions" in {finding["subject"] for finding in told["findings"]}


def test_running_server(tmp_path: Path, run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is well is said to be; one that is not there is a problem."""
    # Nor does it matter here how busy this machine is, and how full its disk.
    monkeypatch.setattr(problems, "_MAX_LOOP_PAUSE_S", math.inf)
    monkeypatch.setattr(problems, "_MIN_FREE_PART", 0.0)
    with watched_server(tmp_path / "data", shards=2) as (server, metrics):
        told = run.json("doctor", "--server", server.address, "--metrics", metrics)
        assert told["is_fit"]
        texts = [finding["text"] for finding in told["findings"]]
        assert "2 shards answer, and nothing is wrong" in texts
        assert any("apart" in text for text in texts)
    assert run("doctor", "--server", server.address, code=1).startswith("problem  server: ")


NOW_S = 1_700_000_000.0


class _Metrics(HTTPServer):
    """A metrics port whose clock shows what it is told to."""

    time_s = NOW_S


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, _Metrics) and self.path == "/status.json"
        body = json.dumps({"time_s": self.server.time_s}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def metrics() -> Iterator[_Metrics]:
    """A port that answers."""
    with _Metrics(("127.0.0.1", 0), _Page) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield server
        finally:
            server.shutdown()
            serving.join()


@pytest.mark.parametrize(
    ("ahead_s", "level", "text"),
    [
        (0.0, "ok", "are less than 0.001 s apart"),
        (0.75, "ok", "are 0.750 s apart"),
        (-0.75, "ok", "are 0.750 s apart"),
        (1.25, "problem", "are 1.250 s apart"),
        (-1.25, "problem", "are 1.250 s apart"),
        (3600.0, "problem", "are 3600.000 s apart"),
        (-3600.0, "problem", "are 3600.000 s apart"),
    ],
)
def test_a_clock_that_is_off_either_way(
    metrics: _Metrics, monkeypatch: pytest.MonkeyPatch, ahead_s: float, level: str, text: str
) -> None:
    """A server that is ahead of this machine by more than a second is a problem, and so is one that is behind."""
    monkeypatch.setattr(doctor_module, "time", SimpleNamespace(time=lambda: NOW_S))
    metrics.time_s = NOW_S + ahead_s
    finding = check_clock(f"127.0.0.1:{metrics.server_port}")
    assert (finding.level, text in finding.text) == (Level(level), True), finding
    assert bool(finding.advice) == (level == "problem")


def test_a_port_that_is_no_metrics_port(metrics: _Metrics) -> None:
    """A port that tells no time, or one that is not finite or fits no float, is a problem."""
    assert "does not tell its time" in check_clock("127.0.0.1:1").text
    for metrics.time_s in (float("nan"), float("inf"), 10**400):
        assert "does not tell its time" in check_clock(f"127.0.0.1:{metrics.server_port}").text
