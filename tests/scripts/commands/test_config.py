"""`headrace config`: every setting with its value and where that is from, and the schema of the YAML file."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from command_line import CommandLine

from headrace.paramserver.config.server_settings import ServerConfig
from headrace.paramserver.system.settings import settings_of

ROOT = Path(__file__).parents[3]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text("port: 7001\nmemtable_bytes: 64MiB\nshards: 2\n")
    return path


def test_each_value_says_where_it_is_from(file: Path, run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag, a variable, a line of the file, or the default; every setting is there, as a file may have it."""
    monkeypatch.setenv("HEADRACE_SERVE_SHARDS", "3")
    lines = run("config", "serve", "--data", "/d", "--config", file, "--insecure-bind").splitlines()
    shown = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert list(shown) == [field.name for field, _ in settings_of(ServerConfig)]
    assert shown["data"] == ["/d", "--data"]
    assert shown["insecure_bind"] == ["on", "--insecure-bind"]
    assert shown["shards"] == ["3", "HEADRACE_SERVE_SHARDS"]
    assert shown["port"] == ["7001", f"{file}:1"]
    assert shown["memtable_bytes"] == ["64MiB", f"{file}:2"]
    assert shown["max_frame_bytes"] == ["64MiB", "default"]
    assert shown["advertise_host"] == ["the", "host", "listened", "on", "default"]


def test_what_a_cluster_file_says(tmp_path: Path, run: CommandLine) -> None:
    """Settings that are in the cluster file have its name."""
    cluster = tmp_path / "cluster.yaml"
    nodes = {"a": {"host": "127.0.0.1", "port": 7001, "shards": [0], "data": str(tmp_path / "a")}}
    server = {"server_id": "3f0c6e0e-8a55-4c6f-9f0f-2d6a6a1f7a11", "shards": 1, "nodes": nodes}
    cluster.write_text(yaml.safe_dump(server))
    found = run.json("config", "serve", "--cluster", cluster, "--node", "a")
    assert found["port"] == {"value": 7001, "from": str(cluster)}
    assert found["log_level"] == {"value": "info", "from": "default"}


def test_a_relay_follows_the_server_of_the_environment(run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable of all commands is named, and goes behind the relay's own."""
    monkeypatch.setenv("HEADRACE_SERVER", "one:7601")
    arguments = ("config", "relay", "--data", "/d")
    assert run.json(*arguments)["server"] == {"value": "one:7601", "from": "HEADRACE_SERVER"}
    monkeypatch.setenv("HEADRACE_RELAY_SERVER", "two:7601")
    assert run.json(*arguments)["server"] == {"value": "two:7601", "from": "HEADRACE_RELAY_SERVER"}


@pytest.mark.parametrize(
    ("text", "says"),
    [("prt: 1", "did you mean 'port'"), ("port: x", "not a whole number"), ("port: 70000", "is more than 65535")],
)
def test_mistakes_are_those_of_the_command(file: Path, text: str, says: str, run: CommandLine) -> None:
    """What `headrace serve` would refuse is refused in the same line."""
    file.write_text(text)
    assert says in run.refused("config", "serve", "--config", file)


@pytest.mark.parametrize(
    ("command", "lacks"), [("serve", ["data"]), ("relay", ["data", "server"]), ("replica", ["server"])]
)
def test_what_must_still_be_given(command: str, lacks: list[str], run: CommandLine) -> None:
    """Settings are shown without the required ones, which are named; the process itself needs them."""
    shown = [line.split() for line in run("config", command).splitlines()]
    assert sorted(words[0] for words in shown if words[1:] == ["none", "required"]) == lacks
    found = run.json("config", command)
    assert [name for name in lacks if found[name] == {"value": None, "from": "required"}] == lacks
    assert "is missing" in run.refused(command)


def test_the_former_name_of_a_port_still_works(
    tmp_path: Path, run: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes have `--port` and `--metrics-port`; help pages know no other name."""
    file = tmp_path / "replica.yaml"
    file.write_text("health_port: 7702\n")
    arguments = ("config", "replica", "--server", "h:1")
    assert run.json(*arguments, "--config", file)["metrics_port"] == {"value": 7702, "from": f"{file}:1"}
    monkeypatch.setenv("HEADRACE_REPLICA_HEALTH_PORT", "7703")
    assert run.json(*arguments)["metrics_port"] == {"value": 7703, "from": "HEADRACE_REPLICA_HEALTH_PORT"}
    assert run.json(*arguments, "--health-port", "7704")["metrics_port"] == {"value": 7704, "from": "--health-port"}
    for command in ("serve", "relay", "replica"):
        assert "health-port" not in run(command, "--help")
        known = json.loads(run("config", command, "--schema"))["properties"]
        names = {name for name, each in known.items() if name.endswith("port") and "deprecated" not in each}
        assert names == {"port", "metrics_port"}


def test_the_schema_knows_what_the_file_may_have(file: Path, run: CommandLine) -> None:
    """It takes files that load, among them the one that is delivered and each default, and refuses others."""
    schema = json.loads(run("config", "serve", "--schema"))
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert list(schema["properties"]) == [field.name for field, _ in settings_of(ServerConfig)]
    delivered = ROOT / "deploy" / "systemd" / "serve.yaml"
    good = [yaml.safe_load(path.read_text()) for path in (file, delivered)]
    good += [{name: each["default"]} for name, each in schema["properties"].items() if "default" in each]
    good += [{"expiry": {"user.*": {"ttl_s": "30d"}}}, {"hang_timeout_s": 0.5}, {"memtable_bytes": "1.5 GiB"}]
    for content in good:
        validator.validate(content)
    bad: list[dict[str, object]] = [{"prt": 1}, {"port": "x"}, {"port": -1}, {"memtable_bytes": "64 MB"}]
    bad += [{"log_level": "loud"}, {"insecure_bind": "x"}, {"hang_timeout_s": "1w"}, {"host": ""}, {"port": True}]
    assert [content for content in bad if validator.is_valid(content)] == []


@pytest.mark.parametrize("command", ["replica", "relay"])
def test_the_schema_has_former_names_as_deprecated(run: CommandLine, command: str) -> None:
    """A file with a setting's name of an earlier release is valid, and an editor strikes that name out."""
    schema = json.loads(run("config", command, "--schema"))
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate({"health_port": 1})
    assert not validator.is_valid({"health_port": -1})
    assert [name for name, each in schema["properties"].items() if each.get("deprecated")] == ["health_port"]
