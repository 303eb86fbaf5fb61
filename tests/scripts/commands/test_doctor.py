"""`headrace doctor`: each unfit thing is found and told with what to do, and a fit machine is fit."""

from __future__ import annotations

import contextlib
import math
import resource
import socket
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

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
from headrace.scripts.commands import remote_checks
from headrace.scripts.commands.doctor import (
    check_disk,
    check_memory,
    check_open_files,
    check_ports,
    check_versions,
)
from headrace.scripts.commands.finding import Finding, Level
from headrace.scripts.commands.remote_checks import check_clock

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
        ({"torchrec": "1.9.0"}, "torchrec is 1.9.0; torch 2.13.0+cpu goes with 1.8.0"),
        ({"fbgemm-gpu-cpu": None}, "fbgemm-gpu-cpu is missing"),
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


def test_a_key_and_a_token_that_serve_would_refuse(tmp_path: Path, run: CommandLine) -> None:
    """A wrong key and an open token file are problems, and the token is not told."""
    (token := tmp_path / "token").write_text("a-token-of-some-length")
    token.chmod(0o644)
    for settings in ({"tls_certificate": TLS / "server.pem", "tls_key": TLS / "client.key.pem"}, {"token_file": token}):
        (config := tmp_path / "headrace.yml").write_text("".join(f"{k}: {v}\n" for k, v in settings.items()))
        told = run.json("doctor", "--data", tmp_path / "data", "--config", config, code=1)
        (text,) = [finding["text"] for finding in told["findings"] if finding["level"] == "problem"]
        assert "a-token-of-some-length" not in text


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little room and slow syncs are problems; nothing is left behind."""
    config = ServerConfig(data=tmp_path / "not" / "there", log_hold_bytes=1 << 20, log_retention_bytes=1 << 20)
    monkeypatch.setattr(doctor_module, "_SLOW_SYNC_S", math.inf)  # of this disk, which others may use
    assert not _problems(check_disk(config, 1))
    assert not list(tmp_path.iterdir())
    assert "may take" in _problems(check_disk(ServerConfig(data=tmp_path, log_hold_bytes=1 << 50), 1))[0]
    monkeypatch.setattr(doctor_module, "_SLOW_SYNC_S", 0.0)
    assert "with its sync takes" in _problems(check_disk(config, 1))[0]


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
        manifest.write_text(manifest.read_text().replace('"format_version": 5', '"format_version": 9'))
    elif spoil == "shard":
        (data / "shard-0001").rename(tmp_path / "unmounted")
    before = sorted(tmp_path.rglob("*"))
    told = run.json("doctor", "--config", config, code=None if says is None else 1)
    (finding,) = [finding for finding in told["findings"] if finding["subject"] == "directory"]
    assert sorted(tmp_path.rglob("*")) == before
    assert finding["level"] == ("ok" if says is None else "problem")
    assert (says or ("a start makes it" if spoil == "new" else ": a store of 3 shards")) in finding["text"]


def test_running_server(tmp_path: Path, run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is well is said to be, its port is no problem of the settings; one that is not there is one."""
    # Nor does it matter here how busy this machine is, and how full its disk.
    monkeypatch.setattr(problems, "_MAX_LOOP_PAUSE_S", math.inf)
    monkeypatch.setattr(problems, "_MIN_FREE_PART", 0.0)
    with watched_server(tmp_path / "data", shards=2) as (server, _):
        told = run.json("doctor", "--server", server.address)
        assert told["is_fit"]
        texts = [finding["text"] for finding in told["findings"]]
        assert "2 shards answer, and nothing is wrong" in texts
        assert any("apart" in text for text in texts)
        config = tmp_path / "server.yaml"
        config.write_text(f"data: {tmp_path / 'new'}\nport: {server.address.rpartition(':')[2]}\n")
        told = run.json("doctor", "--config", config, "--server", server.address)
        assert told["is_fit"]
        assert "ports" not in {finding["subject"] for finding in told["findings"]}
    assert run("doctor", "--server", server.address, code=1).startswith("problem  server: ")


@pytest.mark.parametrize(("ahead_s", "level"), [(0.0, "ok"), (0.9, "ok"), (30.0, "problem"), (-30.0, "problem")])
async def test_a_clock_that_is_off_either_way(monkeypatch: pytest.MonkeyPatch, ahead_s: float, level: str) -> None:
    """A server whose clock is ahead of ours, or behind, by more than a second is a problem."""
    now_s = 1_700_000_000.0
    monkeypatch.setattr(remote_checks, "time", SimpleNamespace(time=lambda: now_s))
    hello = SimpleNamespace(time_us=(now_s + ahead_s) * 1e6)

    async def connect(host: str, port: int) -> Any:
        return contextlib.nullcontext(), hello

    async def greet(client: object) -> Any:
        return hello

    dial = cast("Any", SimpleNamespace(connect=connect, greet=greet))
    finding = await check_clock(dial, "host", 1)
    assert finding.level is Level(level) and bool(finding.advice) == (level == "problem")
    hello.time_us = None
    assert (
        await check_clock(cast("Any", SimpleNamespace(connect=connect, greet=greet)), "host", 1)
    ).level is Level.NOTE
