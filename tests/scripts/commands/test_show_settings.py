"""`--show-settings` of `serve` and `replica`: every setting with its value and where that is from."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from command_line import CommandLine

from headrace.paramserver.config.server_settings import ServerConfig
from headrace.paramserver.system.settings import settings_of


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text("port: 7001\nmemtable_bytes: 64MiB\nshards: 2\n")
    return path


def shown(run: CommandLine, command: str, *arguments: object) -> dict[str, list[str]]:
    lines = run(command, "--show-settings", *arguments).splitlines()
    return {line.split()[0]: line.split()[1:] for line in lines[1:]}


def test_each_value_says_where_it_is_from(file: Path, run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag, a variable, a line of the file, or the default; every setting is there, as a file may have it."""
    monkeypatch.setenv("HEADRACE_SERVE_SHARDS", "3")
    found = shown(run, "serve", "--data", "/d", "--config", file, "--insecure-bind")
    assert list(found) == [field.name for field, _ in settings_of(ServerConfig)]
    assert found["data"] == ["/d", "--data"]
    assert found["insecure_bind"] == ["on", "--insecure-bind"]
    assert found["shards"] == ["3", "HEADRACE_SERVE_SHARDS"]
    assert found["port"] == ["7001", f"{file}:1"]
    assert found["memtable_bytes"] == ["64MiB", f"{file}:2"]
    assert found["max_frame_bytes"] == ["64MiB", "default"]
    assert found["advertise_host"] == ["the", "host", "listened", "on", "default"]


def test_what_a_cluster_file_says(tmp_path: Path, run: CommandLine) -> None:
    """Settings that are in the cluster file have its name."""
    cluster = tmp_path / "cluster.yaml"
    nodes = {"a": {"host": "127.0.0.1", "port": 7001, "shards": [0], "data": str(tmp_path / "a")}}
    server = {"server_id": "3f0c6e0e-8a55-4c6f-9f0f-2d6a6a1f7a11", "shards": 1, "nodes": nodes}
    cluster.write_text(yaml.safe_dump(server))
    found = shown(run, "serve", "--cluster", cluster, "--node", "a")
    assert (found["port"], found["log_level"]) == (["7001", str(cluster)], ["info", "default"])


def test_a_replica_follows_the_server_of_the_environment(run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable of all commands is named, and goes behind the replica's own."""
    monkeypatch.setenv("HEADRACE_SERVER", "one:7601")
    assert shown(run, "replica")["server"] == ["one:7601", "HEADRACE_SERVER"]
    monkeypatch.setenv("HEADRACE_REPLICA_SERVER", "two:7601")
    assert shown(run, "replica")["server"] == ["two:7601", "HEADRACE_REPLICA_SERVER"]


@pytest.mark.parametrize(
    ("text", "says"),
    [("prt: 1", "did you mean 'port'"), ("port: x", "not a whole number"), ("port: 70000", "is more than 65535")],
)
def test_mistakes_are_those_of_the_command(file: Path, text: str, says: str, run: CommandLine) -> None:
    """What `headrace serve` would refuse is refused in the same line."""
    file.write_text(text)
    assert says in run.refused("serve", "--show-settings", "--config", file)


@pytest.mark.parametrize(("command", "lacks"), [("serve", ["data"]), ("replica", ["server"])])
def test_what_must_still_be_given(command: str, lacks: list[str], run: CommandLine) -> None:
    """Settings are shown without the required ones, which are named; the process itself needs them."""
    found = shown(run, command)
    assert sorted(name for name, words in found.items() if words == ["none", "required"]) == lacks
    assert "is missing" in run.refused(command)
