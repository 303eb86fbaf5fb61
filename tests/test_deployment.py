"""What `deploy/` ships fits the command line and the tools that read it; nothing here needs a cluster or a daemon."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from headrace import __version__, cli
from headrace.cli import load_command
from headrace.paramserver.config.cluster_file import ClusterFile, settings_of_node
from headrace.paramserver.config.server_settings import ServerConfig
from headrace.paramserver.rpc.security import READER_TOKEN_ENV, SERVER_TOKEN_ENV, TOKEN_ENV, WRITER_TOKEN_ENV
from headrace.paramserver.system.http_server import HttpServer, Reply, Request
from headrace.schemas.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
_MANIFESTS = ("server.yaml", "replicas.yaml", "follower.yaml", "network.yaml")
_NODES = "nodes.yaml"  # in the place of server.yaml
_REPLICA, _FOLLOWER = "headrace-lookup", "headrace-follower"
# The server of either manifest: the name of its headless service leads to all pods.
_SEED = "headrace.$(POD_NAMESPACE).svc.cluster.local:7601"
# The oldest and the newest version whose schemas are looked at.
_KUBERNETES = ("1.29", "1.34")
# Those of a server's system calls, as strace saw them, that a tighter filter might leave out: the applier's lower
# priority, files of log and store, threads and memory, sockets to the shards and to clients.
_SYSTEM_CALLS = (
    "accept4 bind clone3 close_range epoll_wait fadvise64 fallocate fdatasync flock fsync ftruncate futex kill link "
    "madvise mbind prlimit64 pwritev2 readahead rename sched_getaffinity setpriority setsid socketpair statfs sysinfo"
)
# `systemd-analyze security` gives 0 (closed) to 10 (open), times ten; this is "OK".
_MOST_EXPOSED = "20"


# Options of `serve` that say how to start.
_NO_SETTINGS = ("config", "ready_file", "watch_stdin", "shows_settings", "restore", "cluster", "node")


def _objects(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))


def _of_kind(kind: str, name: str | None = None) -> dict[str, Any]:
    """Return the only object of a kind, or that of a name; those of several hosts have the name `nodes`."""
    files, name = ((_NODES,), None) if name == "nodes" else (_MANIFESTS, name)
    objects = [each for file in files for each in _objects(file) if each["kind"] == kind]
    (found,) = (each for each in objects if name in (None, each["metadata"]["name"]))
    return found


def _config(arguments: list[str]) -> Any:
    """Parse a command as `headrace` does and return its settings; nothing is run."""
    flags = _flags(arguments)
    if arguments[0] == "serve":
        return ServerConfig.load(flags=flags, environ={}, file=None)
    from headrace.paramserver.replica.endpoint.process_config import EndpointConfig

    return EndpointConfig.load(flags=flags, environ={}, file=None)


def _flags(arguments: list[str]) -> dict[str, Any]:
    (entry,) = (each for each in cli._COMMANDS if each.name == arguments[0])
    flags = load_command(entry.name, entry.target, entry.help).make_context(arguments[0], list(arguments[1:])).params
    return {name: value for name, value in flags.items() if name not in _NO_SETTINGS}


def _container(workload: dict[str, Any]) -> dict[str, Any]:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return container


@pytest.mark.parametrize("version", _KUBERNETES)
@pytest.mark.parametrize("name", [*_MANIFESTS, _NODES])
def test_manifests_fit_the_schemas(name: str, version: str) -> None:
    """Every object is valid, without a field that Kubernetes does not know."""
    objects = _objects(name)
    assert objects
    for each in objects:
        kubernetes_validate.validate(each, version, strict=True)


def test_an_unknown_field_is_found() -> None:
    """The check reports a field that is misspelt."""
    workload = _of_kind("StatefulSet")
    _container(workload)["livenessprobe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(workload, _KUBERNETES[-1], strict=True)


def test_kustomization_lists_every_manifest() -> None:
    """`kubectl apply -k` takes all of them, with images of this version."""
    (kustomization,) = _objects("kustomization.yaml")
    assert sorted(kustomization["resources"]) == sorted(_MANIFESTS)
    there = {path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")} - {"kustomization.yaml"}
    assert there == {*_MANIFESTS, _NODES}
    images = {image["name"]: image["newTag"] for image in kustomization["images"]}
    workloads = [_of_kind("StatefulSet"), _of_kind("Deployment", _REPLICA), _of_kind("Deployment", _FOLLOWER)]
    assert images == {_container(workload)["image"]: __version__ for workload in workloads}


def test_kustomize_builds_them(tmp_path: Path) -> None:
    """The tool itself makes the objects, of one host and of several; skipped where it is not installed."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    shutil.copytree(DEPLOY / "kubernetes", tmp_path / "kubernetes")
    for name in ("server.yaml", _NODES):
        file = tmp_path / "kubernetes" / "kustomization.yaml"
        file.write_text(file.read_text().replace("  - server.yaml\n", f"  - {name}\n"))
        done = subprocess.run(["kubectl", "kustomize", str(file.parent)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        made = list(yaml.safe_load_all(done.stdout))
        files = (name, *_MANIFESTS[1:])
        assert sorted(each["kind"] for each in made) == sorted(e["kind"] for file in files for e in _objects(file))
        images = re.findall(r"image: (\S+)", done.stdout)
        assert images and all(image.endswith(f":{__version__}") for image in images)


def test_server_manifest_fits_the_command_line() -> None:
    """Flags of the StatefulSet are settings of `headrace serve`, and its ports, probes and memory are theirs."""
    workload, container = _of_kind("StatefulSet"), _container(_of_kind("StatefulSet"))
    config = _config(container["args"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    shards = {f"shard-{shard}": config.port + shard for shard in range(config.shards)}
    assert ports == {**shards, "metrics": config.metrics_port}
    assert _scraped_port("StatefulSet") == config.metrics_port == _target("headrace-server")
    service = next(each for each in _objects("server.yaml") if each["kind"] == "Service")
    assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == ports
    pod = f"{workload['metadata']['name']}-0.{workload['spec']['serviceName']}."
    assert config.advertise_host.startswith(pod)
    assert _stores(container) == {"HEADRACE_SERVE_OBJECT_STORE"}
    ready = next(arg.partition("=")[2] for arg in container["args"] if arg.startswith("--ready-file="))
    assert container["readinessProbe"]["exec"]["command"][-1] == ready
    assert _asked_by(container["livenessProbe"]) == (config.metrics_port, "/healthz")
    assert workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > config.drain_s + 5
    assert _most_memory(config, container, config.shards) <= _bytes(container["resources"]["limits"]["memory"])


def _asked_by(probe: dict[str, Any]) -> tuple[int, str]:
    """Return port and path of what a probe's command asks; it says nothing on its way, so no network can cut it off."""
    assert set(probe) & {"httpGet", "tcpSocket", "grpc"} == set()
    *interpreter, script = probe["exec"]["command"]
    assert interpreter == ["python", "-Ic"]
    found = re.search(r'\("127\.0\.0\.1", (\d+), timeout=(\d+)\)\n.+"GET", "(/\w+)"', script)
    assert found is not None and int(found[2]) < probe["timeoutSeconds"]
    return int(found[1]), found[3]


async def test_probes_are_answered_while_strangers_hold_the_port() -> None:
    """A probe's command succeeds amid 300 heads that never end, and fails when the page says that all is not well."""
    (server, replica) = (_container(_of_kind(*found)) for found in (("StatefulSet", None), ("Deployment", _REPLICA)))
    scripts = [each["exec"]["command"][-1] for each in (server["livenessProbe"], replica["readinessProbe"])]
    status = 200

    async def page(_: Request) -> Reply:
        return Reply(body=b"", status=status)

    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    async with HttpServer(sock, {"/healthz": page, "/readyz": page}), contextlib.AsyncExitStack() as stack:
        for _ in range(300):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            slow.send(b"GET /healthz HT")
            await asyncio.sleep(0)  # the server's turn

        async def run(script: str) -> bool:
            here = re.sub(r'"127\.0\.0\.1", \d+', f'"127.0.0.1", {port}', script)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-Ic", here, stderr=asyncio.subprocess.DEVNULL
            )
            return await process.wait() == 0

        assert await asyncio.gather(*map(run, scripts)) == [True, True]
        status = 503
        assert await asyncio.gather(*map(run, scripts)) == [False, False]


def _secrets(container: dict[str, Any]) -> dict[str, str]:
    """Return the secret of each variable that holds a token."""
    found = {each["name"]: each.get("valueFrom", {}).get("secretKeyRef", {}) for each in container["env"]}
    return {name: key["name"] for name, key in found.items() if key.get("key") == "token"}


@pytest.mark.parametrize("name", [None, "nodes"])
def test_each_role_has_a_secret_of_its_own(name: str | None) -> None:
    """The server knows a token for each role; those who follow it have the reader's, and none but a job the admin's."""
    server = _secrets(_container(_of_kind("StatefulSet", name)))
    assert set(server) == {TOKEN_ENV, WRITER_TOKEN_ENV, READER_TOKEN_ENV}
    assert len(set(server.values())) == 3
    replica, follower = (_secrets(_container(_of_kind("Deployment", each))) for each in (_REPLICA, _FOLLOWER))
    assert replica[SERVER_TOKEN_ENV] == server[READER_TOKEN_ENV]
    assert replica[TOKEN_ENV] not in server.values()
    assert follower == server  # so that a replica may follow it or the server
    job = _of_kind("CronJob", "nodes")["spec"]["jobTemplate"]["spec"]
    assert _secrets(job["template"]["spec"]["containers"][0]) == {TOKEN_ENV: server[TOKEN_ENV]}
    named = (DEPLOY / "kubernetes" / "README.md").read_text()
    assert all(f"| `{secret}` |" in named for secret in {*server.values(), *replica.values()})


def test_the_network_lets_in_clients_and_prometheus() -> None:
    """Each workload has a policy: its ports of Thrift are for clients, and that of metrics for Prometheus alone."""
    policies = {each["metadata"]["name"]: each["spec"] for each in _objects("network.yaml")}
    workloads = [_of_kind("StatefulSet"), _of_kind("Deployment", _REPLICA), _of_kind("Deployment", _FOLLOWER)]
    assert set(policies) == {each["metadata"]["name"] for each in workloads}
    for workload in workloads:
        policy = policies[workload["metadata"]["name"]]
        assert policy["podSelector"] == workload["spec"]["selector"]
        clients, monitoring = policy["ingress"]
        ports = {port["name"]: port["containerPort"] for port in _container(workload)["ports"]}
        (metrics,) = (port for name, port in ports.items() if name in ("metrics", "health"))
        (let_in,) = clients["ports"]
        assert [*range(let_in["port"], let_in.get("endPort", let_in["port"]) + 1)] == sorted(
            {*ports.values()} - {metrics}
        )
        assert monitoring["ports"] == [{"port": metrics}]
        assert all("namespaceSelector" in source for source in monitoring["from"])


def _stores(container: dict[str, Any]) -> set[str]:
    """Return the variables that name the object store; its credentials come with it, if there is one."""
    (credentials,) = container["envFrom"]
    assert credentials["secretRef"] == {"name": "headrace-object-store", "optional": True}
    key = {"name": "headrace-object-store", "key": "url", "optional": True}
    return {each["name"] for each in container["env"] if each.get("valueFrom", {}).get("secretKeyRef") == key}


def test_nodes_fit_the_command_line_and_the_cluster_file(tmp_path: Path) -> None:
    """Each pod of the StatefulSet is a node of the cluster file, at the pod's name, with its ports and memory."""
    workload, container = _of_kind("StatefulSet", "nodes"), _container(_of_kind("StatefulSet", "nodes"))
    volume = next(v for v in workload["spec"]["template"]["spec"]["volumes"] if "configMap" in v)
    made = _of_kind("ConfigMap", "nodes")
    mounted = next(at["mountPath"] for at in container["volumeMounts"] if at["name"] == volume["name"])
    assert volume["configMap"]["name"] == made["metadata"]["name"]
    text = made["data"]["cluster.yaml"]
    with pytest.raises(ConfigError, match="SERVER-ID' is no UUID; here is a new one"):
        _cluster(tmp_path, text)
    cluster = _cluster(tmp_path, text.replace("SERVER-ID", str(uuid.uuid4())).replace("NAMESPACE", "ads"))
    name, service = workload["metadata"]["name"], workload["spec"]["serviceName"]
    assert list(cluster.nodes) == [f"{name}-{number}" for number in range(workload["spec"]["replicas"])]
    assert f"--cluster={mounted}/cluster.yaml" in container["args"] and "--node=$(POD_NAME)" in container["args"]
    (pod_name,) = (each for each in container["env"] if each["name"] == "POD_NAME")
    assert pod_name["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert [line.strip() for line in (DEPLOY / "kubernetes" / _NODES).read_text().splitlines()].count(
        "# - --restore"
    ) == 1
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {p["name"]: p["port"] for p in _of_kind("Service", "nodes")["spec"]["ports"]} == ports
    whole = _config(_container(_of_kind("StatefulSet"))["args"])
    assert cluster.num_shards == whole.shards  # so that its server can move to several hosts
    for node in cluster.nodes.values():
        assert node.host == f"{node.name}.{service}.ads.svc.cluster.local"
        assert f"{service}.$(POD_NAMESPACE).svc.cluster.local:{node.port}" == _SEED
        defaults, fixed = settings_of_node(cluster, node)
        flags = _flags([*container["args"], "--restore"])
        config = ServerConfig.load(flags=flags, environ={}, file=None, defaults=defaults, fixed=fixed)
        shard_ports = [port for _, port in node.addresses.values()]
        assert sorted(ports.values()) == [*shard_ports, config.metrics_port]
        assert _most_memory(config, container, len(node.shards)) <= _bytes(container["resources"]["limits"]["memory"])
    assert _scraped_port("StatefulSet", "nodes") == config.metrics_port == _target("headrace-server")
    assert _asked_by(container["livenessProbe"]) == (config.metrics_port, "/healthz")
    ready = next(arg.partition("=")[2] for arg in container["args"] if arg.startswith("--ready-file="))
    assert container["readinessProbe"]["exec"]["command"][-1] == ready
    assert workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > config.drain_s + 5
    assert _stores(container) == set()  # the cluster file says it
    job = _of_kind("CronJob", "nodes")["spec"]["jobTemplate"]["spec"]
    (snapshot,) = job["template"]["spec"]["containers"]
    assert snapshot["args"][:3] == ["snapshot", "create", _SEED]
    given = {arg.partition("=")[0] for arg in snapshot["args"][3:]}
    help_text = subprocess.run(
        [sys.executable, "-m", "headrace", "snapshot", "create", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
    ).stdout
    assert given and all(flag in help_text for flag in given)


def _cluster(directory: Path, text: str) -> ClusterFile:
    (directory / "cluster.yaml").write_text(text)
    return ClusterFile.load(directory / "cluster.yaml")


def _scraped_port(kind: str, name: str | None = None) -> int:
    """Return the port at which Prometheus is told to find a pod's metrics."""
    annotations = _of_kind(kind, name)["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/scrape"] == "true"
    return int(annotations["prometheus.io/port"])


def _target(job: str) -> int:
    """Return the port of a job of the example configuration."""
    jobs = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    ((target,),) = (each["targets"] for found in jobs if found["job_name"] == job for each in found["static_configs"])
    return int(target.partition(":")[2])


def _most_memory(config: ServerConfig, container: dict[str, Any], num_shards: int) -> float:
    """Return what the shards of a pod may take, by the rule of docs/operations.md."""
    shard = (
        config.memtable_bytes
        + 2 * config.max_inflight_bytes
        + config.max_log_pending_bytes
        + config.max_backlog_bytes
        + 600 * 2**20
    )
    return _bytes(container["resources"]["limits"]["memory"]) / 4 + num_shards * shard


def _bytes(text: str) -> int:
    assert text.endswith("Gi")
    return int(text.removesuffix("Gi")) * 2**30


@pytest.mark.torchrec
def test_replica_manifest_fits_the_command_line() -> None:
    """Flags of the Deployment are settings of `headrace replica`, and it follows the server of the other manifest."""
    container = _container(_of_kind("Deployment", _REPLICA))
    config = _config(container["args"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"thrift": config.port, "health": config.metrics_port}
    assert _scraped_port("Deployment", _REPLICA) == config.metrics_port == _target("headrace-replica")
    # What is left there by a replica that was killed outlives its container, and only a named place is cleared.
    assert Path("/tmp") in config.disk_dir.parents and "/tmp" in {at["mountPath"] for at in container["volumeMounts"]}
    assert config.server == _SEED
    assert _stores(container) == {"HEADRACE_REPLICA_OBJECT_STORE"}
    assert _asked_by(container["livenessProbe"]) == (config.metrics_port, "/healthz")
    assert _asked_by(container["readinessProbe"]) == (config.metrics_port, "/readyz")


def test_follower_manifest_fits_the_command_line() -> None:
    """Flags of the follower's Deployment are settings of `headrace serve`; its ports, memory and volume suffice."""
    workload = _of_kind("Deployment", _FOLLOWER)
    container = _container(workload)
    config, server = _config(container["args"]), _config(_container(_of_kind("StatefulSet"))["args"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {
        **{f"shard-{shard}": config.port + shard for shard in range(server.shards)},
        "metrics": config.metrics_port,
    }
    service = _of_kind("Service", _FOLLOWER)
    assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == ports
    assert config.advertise_host.startswith(f"{_FOLLOWER}.")
    assert config.follow == _SEED
    assert server.port == 7601 and server.advertise_host.endswith(_SEED.removesuffix(":7601"))
    assert _scraped_port("Deployment", _FOLLOWER) == config.metrics_port == _target("headrace-server")
    assert workload["spec"]["strategy"] == {"type": "Recreate"}, "two followers cannot share a directory"
    assert _most_memory(config, container, server.shards) <= _bytes(container["resources"]["limits"]["memory"])
    volumes = {each["name"]: each for each in workload["spec"]["template"]["spec"]["volumes"]}
    assert _bytes(volumes["data"]["emptyDir"]["sizeLimit"]) >= server.shards * config.log_hold_bytes * 3 // 2
    assert _asked_by(container["livenessProbe"]) == (config.metrics_port, "/healthz")
    ready = next(arg.partition("=")[2] for arg in container["args"] if arg.startswith("--ready-file="))
    assert container["readinessProbe"]["exec"]["command"][-1] == ready


def test_compose_file_fits_the_command_line() -> None:
    """Commands of the services parse; the follower follows the server, and the replica the follower."""
    services = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"]
    server, follower = _config(services["server"]["command"]), _config(services["follower"]["command"])
    assert follower.follow == f"127.0.0.1:{server.port}"
    assert not {*range(follower.port, follower.port + server.shards)} & {
        *range(server.port, server.port + server.shards)
    }
    assert f"--server=127.0.0.1:{follower.port}" in services["replica"]["command"]
    for service in services.values():
        assert service["image"].endswith(f":{__version__}")


def test_example_of_compose_shows_what_deploy_has() -> None:
    """The replica follows the server, Prometheus scrapes both, and Grafana shows the dashboard, by mounted files."""
    file = ROOT / "examples" / "compose" / "compose.yaml"
    services = yaml.safe_load(file.read_text())["services"]
    server, replica = _config(services["server"]["command"]), services["replica"]["command"]
    extended = services["server"]["extends"]
    base = yaml.safe_load((file.parent / extended["file"]).read_text())["services"][extended["service"]]
    assert _config(base["command"]).data == server.data
    assert server.metrics_port == _target("headrace-server")
    assert f"--server=127.0.0.1:{server.port}" in replica
    assert f"--metrics-port={_target('headrace-replica')}" in replica
    assert services["replica"]["image"].endswith(f":{__version__}")
    assert services["replica"]["build"]["target"] in _stages()
    mounted = {}
    for name in ("prometheus", "grafana"):
        ((source, target, _),) = (volume.split(":") for volume in services[name]["volumes"])
        mounted[target] = (file.parent / source).resolve()
    (flag,) = (each for each in services["prometheus"]["command"] if each.startswith("--config.file="))
    shown = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    for path in (flag.partition("=")[2], shown):
        folder, name = path.rsplit("/", 1)
        assert (mounted[folder] / name).is_file(), path
    configs = yaml.safe_load(file.read_text())["configs"]
    assert {each["source"] for each in services["grafana"]["configs"]} == set(configs)
    (source,) = yaml.safe_load(configs["datasource"]["content"])["datasources"]
    (listen,) = (each for each in services["prometheus"]["command"] if each.startswith("--web.listen-address="))
    assert source["url"] == f"http://{listen.partition('=')[2]}"
    (provider,) = yaml.safe_load(configs["dashboards"]["content"])["providers"]
    assert provider["options"]["path"] in mounted


def test_release_workflow_calls_what_is_there() -> None:
    """A tag of a version starts it, and the scripts, files and stages that its steps name exist."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    steps = "\n".join(step.get("run", "") for step in workflow["jobs"]["release"]["steps"])
    (script,) = re.findall(r"scripts/\S+", steps)
    assert os.access(ROOT / script, os.X_OK)
    files = re.findall(r"--(?:constraint|file) (\S+)", steps)
    assert files and all((ROOT / file).is_file() for file in files)
    (targets,) = re.findall(r"for target in (.+); do", steps)
    assert set(targets.split()) == {"server", "replica", "replica-torch"} <= set(_stages())


@pytest.mark.parametrize(
    ("kind", "name"),
    [("StatefulSet", None), ("StatefulSet", "nodes"), ("Deployment", _REPLICA), ("Deployment", _FOLLOWER)],
)
def test_pods_are_locked_down(kind: str, name: str | None) -> None:
    """No pod runs as root, writes to its image, keeps a capability or gets variables of services."""
    pod = _of_kind(kind, name)["spec"]["template"]["spec"]
    context = _container(_of_kind(kind, name))["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
    assert not pod["enableServiceLinks"] and not pod["automountServiceAccountToken"]
    assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
    assert context["capabilities"] == {"drop": ["ALL"]}


def test_an_unknown_flag_is_found() -> None:
    """The check reports flags and values that the command line does not take."""
    with pytest.raises(Exception, match="--shrads"):
        _config(["serve", "--data=x", "--shrads=2"])
    with pytest.raises(ConfigError, match="max-inflight-bytes"):
        _config(["serve", "--data=x", "--max-inflight-bytes=many"])


def _unit() -> str:
    return (DEPLOY / "systemd" / "headrace.service").read_text()


def test_unit_fits_the_command_line(tmp_path: Path) -> None:
    """ExecStart is a command that parses, with the settings file that stands beside it; exit codes are the server's."""
    command = re.search(r"^ExecStart=/opt/headrace/bin/headrace (.+)$", _unit(), re.MULTILINE)
    assert command is not None
    config = _config(command[1].split())
    assert str(config.data) == "/var/lib/headrace"  # of StateDirectory=headrace
    sample = (DEPLOY / "systemd" / "serve.yaml").read_text()
    everything = tmp_path / "serve.yaml"
    everything.write_text(re.sub(r"^# (?=\w+: )", "", sample, flags=re.MULTILINE))
    for file in (DEPLOY / "systemd" / "serve.yaml", everything):
        ServerConfig.load(flags={"data": tmp_path}, environ={}, file=file)
    assert "RestartPreventExitStatus=2 3\n" in _unit()


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """`systemd-analyze` finds nothing wrong in the unit, and little that is open; skipped where it is not installed."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "headrace.service"
    unit.write_text(_unit().replace("/opt/headrace/bin/headrace", "/bin/true"))  # it must be there
    for arguments in (["verify"], ["security", "--offline=true", f"--threshold={_MOST_EXPOSED}"]):
        done = subprocess.run(["systemd-analyze", *arguments, str(unit)], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout


def _calls_of(names: set[str], sets: dict[str, list[str]]) -> set[str]:
    """Return the system calls of some names, which may be sets of calls and of sets."""
    calls = {name for name in names if not name.startswith("@")}
    for name in names - calls:
        calls |= _calls_of(set(sets[name]), sets)
    return calls


def test_unit_lets_the_server_work() -> None:
    """The filter of system calls has all that a server needs; skipped where systemd is not installed."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    done = subprocess.run(["systemd-analyze", "syscall-filter"], capture_output=True, text=True, timeout=60)
    sets: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("@"):
            sets[line] = []
        elif line.startswith("    ") and not line.lstrip().startswith("#"):
            sets[list(sets)[-1]].append(line.strip())
    allowed: set[str] = set()
    for rule in re.findall(r"^SystemCallFilter=(.+)$", _unit(), re.MULTILINE):
        calls = _calls_of(set(rule.removeprefix("~").split()), sets)
        allowed = allowed - calls if rule.startswith("~") else allowed | calls
    assert set(_SYSTEM_CALLS.split()) - allowed == set()


def _dockerfile() -> str:
    return (DEPLOY / "docker" / "Dockerfile").read_text()


def _stages() -> dict[str, str]:
    """Return what each stage of the Dockerfile says, by name."""
    parts = re.split(r"^FROM (\S+) AS (\S+)$", _dockerfile(), flags=re.MULTILINE)
    return {
        name: f"FROM {base}\n{text}" for base, name, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True)
    }


def test_images_are_not_roots_and_one_has_torch() -> None:
    """All images run as a number above 0, and torch is installed for replicas with a precision alone."""
    stages = _stages()
    assert re.search(r"^USER (?!0)\d+:\d+$", stages["base"], re.MULTILINE)
    of_image = {"server": "environment", "replica": "environment", "replica-torch": "torch-environment"}
    for name, environment in of_image.items():
        assert stages[name].startswith("FROM base\n") and "USER" not in stages[name]
        assert f"COPY --from={environment} " in stages[name]
    assert {name for name, text in stages.items() if "torch==" in text} == {"torch-environment"}
    assert stages["environment"].startswith("FROM ${PYTHON_IMAGE}")
    torch = re.search(r"torch==(\S+)", _dockerfile())
    assert torch is not None and f"torch=={torch[1]}\n" in (ROOT / "constraints.txt").read_text()
    assert list(stages)[-1] == "server"  # what a build without --target makes


def test_images_have_no_installer_and_are_built_without_a_front_end() -> None:
    """The environments are made without pip and checked by another's; builders need to know COPY and RUN, no more."""
    assert "-m venv --without-pip /opt/headrace\n" in _dockerfile() and "/bin/pip" not in _dockerfile()
    installs = re.findall(r"pip --python /opt/headrace/bin/python install .+?(?=\n\n)", _dockerfile(), re.DOTALL)
    assert len(installs) == 2 and all("pip --python /opt/headrace/bin/python check" in each for each in installs)
    assert "--mount" not in _dockerfile() and "# syntax" not in _dockerfile()


def test_images_copy_what_is_there_and_not_ignored() -> None:
    """Each path that is copied from the build's context exists, and the ignore file lets it through."""
    copied = [
        path.rstrip("/")
        for line in re.findall(r"^COPY (?!--from)(.+) \S+$", _dockerfile(), re.MULTILINE)
        for path in line.split()
    ]
    ignore = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in ignore
    assert {path for path in copied} == {line[1:] for line in ignore if line.startswith("!")}
    assert all((ROOT / path).exists() for path in copied)


@pytest.mark.parametrize("stage", ["server", "replica", "replica-torch"])
@pytest.mark.torchrec
def test_images_run_commands_that_are_there(stage: str) -> None:
    """CMD is a command of `headrace`, and the documented tags have its version."""
    command = re.search(r"^CMD \[(.+)\]$", _stages()[stage], re.MULTILINE)
    assert command is not None
    arguments = [word.strip(' "') for word in command[1].split(",")]
    if "--help" in arguments:
        assert cli.main(arguments) == 0
    else:
        assert _config(arguments).data is not None
    assert f":{__version__} ." in _dockerfile()
