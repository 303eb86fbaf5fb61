"""`headrace doctor`: check this machine, a configuration and a running server, and advise on problems.

Each check returns findings, and changes nothing.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import os
import resource
import socket
import ssl
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated

from rich.console import Console

from headrace.paramserver.config.cluster_file import ClusterFile, ClusterNode, cluster_of, settings_of_node
from headrace.paramserver.config.data_dir import check_data_dir, is_in_use
from headrace.paramserver.config.server_settings import ENV_PREFIX, ServerConfig
from headrace.paramserver.log.jetstream.nats_address import NatsAccess, NatsLogAddress
from headrace.paramserver.log.opening import kind_of_log
from headrace.paramserver.observe.problems import Severity, find_problems
from headrace.paramserver.observe.status_query import StatusAccess, ask_shards
from headrace.paramserver.reading.link import Dial
from headrace.paramserver.rpc.address import format_address, parse_address
from headrace.paramserver.rpc.security import Protection, node_credentials
from headrace.paramserver.system.flags import settings_sources
from headrace.paramserver.system.limits import FILES_OF_STORE, machine_memory_bytes
from headrace.paramserver.system.text import counted, format_size
from headrace.paramserver.system.torch_releases import (
    RELEASES,
    installed_fbgemm,
    installed_version,
    is_same_minor,
    release_for,
)
from headrace.schemas.errors import HeadraceError
from headrace.schemas.extras import install_command
from headrace.schemas.idl import idl
from headrace.scripts.commands.finding import Finding, Level, note, ok, problem
from headrace.scripts.commands.remote_checks import (
    MAX_CLOCK_S,
    check_claims,
    check_log_engine,
    check_nodes,
    check_object_store,
)
from headrace.scripts.commands.terminal import (
    Access,
    AsJson,
    ServerOrOtherFlag,
    escape,
    option,
    output_console,
    server_unless,
    with_server_flags,
)

__all__ = [
    "Finding",
    "Level",
    "check_clock",
    "check_disk",
    "check_gpu",
    "check_memory",
    "check_mode",
    "check_open_files",
    "check_ports",
    "check_protection",
    "check_versions",
    "doctor",
]

_TIMEOUT_S = 5.0
_PROCESS_BYTES = 600 << 20
# What a shard with a trainer takes besides memtable and cache: process 60, log's tail 32, trainer's window 32 MiB. The
# sum was within 6 % of what was measured (docs/operations.md).
_USUAL_BYTES = 124 << 20
_VOLATILE, _REMOTE = {"tmpfs", "ramfs"}, {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs"}
_NUM_SYNCS, _SYNC_BYTES = 32, 256 << 10
_SLOW_SYNC_S = 0.05
_SOON_S = 30 * 86400.0


_STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.PROBLEM: "bold red"}


def check_versions(version_of: Callable[[str], str | None] = installed_version) -> Iterator[Finding]:
    """Compare the versions of distributions that must fit together; `version_of` returns None for a missing one."""
    subject = "versions"
    yield ok(subject, f"Headrace {version_of('headrace')}, Python {sys.version.split()[0]}")
    torch = version_of("torch")
    if torch is None:
        yield note(
            subject,
            "torch is not installed: enough for servers and `headrace replica`",
            f"Trainers and EmbeddingReplica need it: {install_command('torch')}.",
        )
        return
    release = release_for(torch)
    if release is None:
        tested = ", ".join(each.torch for each in RELEASES)
        yield note(subject, f"torch {torch} is not tested", f"Tested: {tested}. `streamer.audit()` compares every row.")
    else:
        yield ok(subject, f"torch {torch}")
    torchrec, fbgemm = version_of("torchrec"), installed_fbgemm(version_of)
    if torchrec is None and fbgemm is None:
        yield note(subject, "torchrec and fbgemm are not installed: enough for torch.optim models")
        return
    fbgemm_name, fbgemm_version = fbgemm or ("fbgemm-gpu", None)
    for name, version, wanted in (
        ("torchrec", torchrec, release.torchrec if release is not None else torchrec),
        (fbgemm_name, fbgemm_version, release.fbgemm if release is not None else fbgemm_version),
    ):
        if version is None or (wanted is not None and not is_same_minor(version, wanted)):
            text = f"{name} is {version or 'missing'}; torch {torch} goes with {wanted or 'that of its own release'}"
            pinned = f"{name}=={wanted}" if wanted else name
            on_cpu = " (without a GPU fbgemm-gpu-cpu)" if fbgemm is None and name == fbgemm_name else ""
            yield problem(subject, text, f"pip install --no-deps {pinned}{on_cpu}")
        else:
            yield ok(subject, f"{name} {version}")


def check_gpu() -> Iterator[Finding]:
    """Check for a GPU and kernels for it."""
    subject = "gpu"
    try:
        import torch
    except ImportError:
        return
    if not torch.cuda.is_available():
        yield ok(subject, "none seen; everything runs on processors")
        return
    from headrace.kernels.runtime.cuda_module import FAMILIES, KernelsUnavailableError
    from headrace.kernels.runtime.dispatch import gpu_module

    name = torch.cuda.get_device_name()
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        for family in FAMILIES:
            gpu_module(family, device)
    except KernelsUnavailableError as exc:
        yield note(subject, f"{name}, without kernels for it, so torch's own operations are used: {exc}")
    else:
        yield ok(subject, f"{name}, with kernels for it")


def _check_directory(
    config: ServerConfig, cluster: ClusterFile | None, node: ClusterNode | None
) -> tuple[Finding, int]:
    """Check the data directory as a start does; return the finding and the number of shards there."""
    subject = "directory"
    num_shards = len(node.copies) if node is not None else config.shards or 1
    try:
        kind = kind_of_log(config.log)
        manifest = check_data_dir(config.data, num_shards=config.shards, cluster=cluster, node=node, log=kind)
    except HeadraceError as exc:
        return problem(subject, str(exc), "`headrace serve` would not start."), num_shards
    if manifest is None:
        return ok(subject, f"{config.data}: no store yet, a start makes it"), num_shards
    num_shards = len(manifest.shards)
    return ok(subject, f"{config.data} holds a store of {counted(num_shards, 'shard')}"), num_shards


def check_mode(data: Path) -> Iterator[Finding]:
    """Tell of a data directory that other users may enter: one that a start makes is for the server's alone."""
    try:
        mode = stat.S_IMODE(data.stat().st_mode)
    except OSError:
        return
    if mode & 0o077:
        yield note("permissions", f"other users may enter {data}: its mode is {mode:04o}", f"chmod 700 {data}")


def check_open_files(max_connections: int) -> Iterator[Finding]:
    """Compare the limit of open files with the number that a shard may need."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + FILES_OF_STORE
    if hard != resource.RLIM_INFINITY and hard < wanted:
        advice = f"Raise it (ulimit -Hn {wanted}, LimitNOFILE= in systemd), or lower --max-connections."
        yield problem("open files", f"the limit is {hard}, a shard may need {wanted}", advice)
    else:
        yield ok("open files", f"a shard may need {wanted}, and may have them")


def check_memory(config: ServerConfig, num_shards: int, memory_bytes: int | None = None) -> Iterator[Finding]:
    """Tell what memory the server takes; compare what it may take with the machine's, `memory_bytes` if not None.

    A block cache of 0 counts as the fraction of the machine's memory that it will be.
    """
    memory_bytes = machine_memory_bytes() if memory_bytes is None else memory_bytes
    cache = config.block_cache_bytes or memory_bytes // 4 // num_shards
    shard = cache + config.memtable_bytes + 2 * config.max_inflight_bytes
    shard += config.max_log_pending_bytes + config.max_backlog_bytes + _PROCESS_BYTES
    total = shard * num_shards
    usual = num_shards * (config.memtable_bytes + _USUAL_BYTES)
    filled = usual + num_shards * cache
    text = (
        f"{counted(num_shards, 'shard')} take{'s' * (num_shards == 1)} about {format_size(usual)}, and "
        f"{format_size(filled)} once reads have filled the block cache; at most {format_size(total)}; "
        f"the machine has {format_size(memory_bytes)}"
    )
    if total > memory_bytes:
        advice = "Lower --max-inflight-bytes, --max-backlog-bytes or --block-cache-bytes, or take fewer shards."
        yield problem("memory", text, advice)
    else:
        yield ok("memory", text)


def check_ports(config: ServerConfig, num_shards: int) -> Iterator[Finding]:
    """Check that the ports of the server are free."""
    wanted = [(config.host, config.port + shard, "--port") for shard in range(num_shards) if config.port]
    if config.metrics_port:
        wanted.append((config.metrics_host, config.metrics_port, "--metrics-port"))
    is_running = config.data.is_dir() and is_in_use(config.data)
    taken = [(port, flag) for host, port, flag in wanted if not _is_free(host, port)]
    if not taken:
        yield ok("ports", f"free: {', '.join(str(port) for _, port, _ in wanted) or 'the system chooses'}")
    elif is_running:
        yield note("ports", f"taken: {', '.join(str(port) for port, _ in taken)}, and a server runs in --data")
    else:
        for port, flag in taken:
            yield problem("ports", f"port {port} is taken", f"End who has it (ss -ltnp), or choose another {flag}.")


def _is_free(host: str, port: int) -> bool:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(1)
    except OSError:
        return False
    return True


def check_protection(config: ServerConfig, environ: Mapping[str, str], now_s: float | None = None) -> Iterator[Finding]:
    """Load certificate, key, authorities and token as the server does, and check the certificates' dates.

    Args:
        config: Settings.
        environ: Environment that may have a token.
        now_s: Wall clock, seconds since 1970; None reads it.
    """
    subject, now_s = "protection", time.time() if now_s is None else now_s
    try:
        protection = Protection.load(config, environ)
    except HeadraceError as exc:
        yield problem(subject, str(exc), "The server would not start; mend the file or the flag.")
        return
    yield ok(
        subject,
        "clients are authenticated over TLS"
        if protection.is_complete
        else "clients show nothing; it listens on loopback only",
    )
    for path in (config.tls_certificate, config.tls_client_authority):
        if path is not None:
            yield _check_dates(path, now_s)


def _check_dates(path: Path, now_s: float) -> Finding:
    # The only access to a certificate's dates in the standard library; a package would be needed just for this.
    dates = ssl._ssl._test_decode_cert(str(path))  # type: ignore[attr-defined]
    begins_s, ends_s = (ssl.cert_time_to_seconds(dates[name]) for name in ("notBefore", "notAfter"))
    if now_s < begins_s:
        return problem("protection", f"{path} holds from {dates['notBefore']} on", "Look at this machine's clock.")
    if now_s >= ends_s:
        return problem("protection", f"{path} has expired on {dates['notAfter']}", "Renew it and restart the server.")
    if ends_s - now_s < _SOON_S:
        days = int((ends_s - now_s) // 86400)
        return problem("protection", f"{path} expires in {counted(days, 'day')}", "Renew it and restart the server.")
    return ok("protection", f"{path} holds until {dates['notAfter']}")


def check_disk(config: ServerConfig, num_shards: int, mounts: Path = Path("/proc/mounts")) -> Iterator[Finding]:
    """Check the file system of the data directory: type, room, and how long a sync takes.

    Writes 8 MiB to an unnamed file in it, or in the nearest directory above it that exists. `mounts` lists the mounted
    file systems.
    """
    subject = "disk"
    place = config.data.absolute()
    while not place.is_dir():
        place = place.parent
    if not os.access(place, os.W_OK | os.X_OK):
        advice = "Let the server's user write there, or choose another --data."
        yield problem(subject, f"{place} is not writable", advice)
        return
    kind = _kind_of(place.resolve(), mounts)
    if kind in _VOLATILE:
        yield problem(subject, f"{place} is on {kind}: gone after a restart", "An ack means on disk: choose a disk.")
    elif kind in _REMOTE:
        advice = "Locks and syncs may not hold there: choose a local disk."
        yield problem(subject, f"{place} is on {kind}, a file system of another machine", advice)
    yield from _check_room(config, num_shards, place)
    yield from _check_syncs(place)


def _kind_of(place: Path, mounts: Path) -> str:
    """Return the type of a directory's file system, the one with the longest mount point above it."""
    found, kind = "", "unknown"
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        _, point, of, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        if place.is_relative_to(point) and len(point) >= len(found):
            found, kind = point, of
    return kind


def _check_room(config: ServerConfig, num_shards: int, place: Path) -> Iterator[Finding]:
    files = os.statvfs(place)
    free = files.f_bavail * files.f_frsize
    log = config.log_hold_bytes * num_shards
    if files.f_favail and files.f_favail < 10_000:
        text = f"only {files.f_favail} inodes are free at {place}"
        yield problem("disk", text, "Remove files, or choose another disk.")
    if free < log:
        shards = counted(num_shards, "shard")
        text = f"{format_size(free)} free at {place}; the logs of {shards} may take {format_size(log)}"
        yield problem("disk", text, "Lower --log-hold-bytes and --log-retention-bytes, or add disk.")
    else:
        yield ok("disk", f"{format_size(free)} free at {place}; logs may take {format_size(log)}, rows come on top")


def _check_syncs(place: Path) -> Iterator[Finding]:
    block, times_s = os.urandom(_SYNC_BYTES), []
    try:
        with tempfile.TemporaryFile(dir=place, buffering=0) as file:
            for _ in range(_NUM_SYNCS):
                begun_s = time.perf_counter()
                file.write(block)
                os.fdatasync(file.fileno())
                times_s.append(time.perf_counter() - begun_s)
    except OSError as exc:
        yield problem("disk", f"writing to {place}: {exc.strerror}", "Look at the disk and at its file system.")
        return
    median_s, rate = sorted(times_s)[len(times_s) // 2], _NUM_SYNCS * _SYNC_BYTES / sum(times_s)
    text = f"a write of 256 KiB with its sync takes {median_s * 1000:.1f} ms, {format_size(rate)} a second"
    if median_s > _SLOW_SYNC_S:
        yield problem("disk", text, "Each ack waits for a sync: choose a faster disk.")
    else:
        yield ok("disk", text)


@with_server_flags
def doctor(
    *,
    data: Annotated[Path | None, option("Data directory of a server.", "DIR")] = None,
    config: Annotated[
        Path | None, option("The server's YAML file; environment variables apply as for `serve`.", "FILE")
    ] = None,
    cluster: Annotated[Path | None, option("The server's cluster file; asks the other nodes, too.", "FILE")] = None,
    node: Annotated[str | None, option("The node of the cluster that runs here.", "NAME")] = None,
    server: ServerOrOtherFlag = None,
    metrics: Annotated[str | None, option("Its metrics port, to compare the clocks.", "HOST:PORT")] = None,
    log: Annotated[str | None, option("Servers of a replicated log: nats://HOST,HOST,HOST.", "URL")] = None,
    log_credentials: Annotated[Path | None, option("What to show them; NATS_CREDS and such, too.", "FILE")] = None,
    log_tls_authority: Annotated[Path | None, option("Authorities of their certificates, PEM.", "FILE")] = None,
    log_tls_certificate: Annotated[Path | None, option("Our certificate for them, PEM.", "FILE")] = None,
    log_tls_key: Annotated[Path | None, option("Its key, PEM.", "FILE")] = None,
    log_monitor: Annotated[
        str | None, option("Their monitoring, with commas; by default port 8222 of each.", "URLS")
    ] = None,
    as_json: AsJson = False,
    access: Access,
) -> int:
    """Check this machine, a server's configuration and a running server, and advise on each finding.

    Nothing is changed. --data, --config and --cluster with --node check what `headrace serve` would use; the server of
    HEADRACE_SERVER is asked only without them. The exit code is 1 if there is a problem.
    """
    findings = [*check_versions(), *check_gpu()]
    settings = next((given for given in (data, config, cluster, node) if given is not None), None)
    if settings is not None:
        findings += _check_server_settings(data, config, cluster, node, access)
    # The server of these settings may not run yet, so only --server asks one.
    if (server := server_unless(settings, server)) is not None:
        try:
            findings += _check_server(access(server, timeout_s=_TIMEOUT_S))
        except HeadraceError as exc:
            advice = "Is it running, is this its address, are token and TLS those it asks for?"
            findings.append(problem("server", str(exc), advice))
    if metrics is not None:
        findings.append(check_clock(metrics))
    if log is not None:
        tls = {"tls_authority": log_tls_authority, "tls_certificate": log_tls_certificate, "tls_key": log_tls_key}
        address = NatsLogAddress.parse(log)
        access_to_log = NatsAccess(address=address, credentials=log_credentials, environ=os.environ, **tls)
        findings += check_log_engine(access_to_log, [] if log_monitor is None else log_monitor.split(","))
    has_problem = any(finding.level is Level.PROBLEM for finding in findings)
    if as_json:
        facts = [{**asdict(finding), "level": finding.level.value} for finding in findings]
        print(json.dumps({"is_fit": not has_problem, "findings": facts}, indent=2))
    else:
        _show(findings, output_console())
    return 1 if has_problem else 0


def _check_server_settings(
    data: Path | None, file: Path | None, cluster: Path | None, node: str | None, access: Access
) -> Iterator[Finding]:
    environ, file = settings_sources(ENV_PREFIX, file, os.environ)
    try:
        of_cluster, of_node = cluster_of(cluster, node, environ=environ, env_prefix=ENV_PREFIX)
        defaults, fixed = settings_of_node(of_cluster, of_node)
        settings = ServerConfig.load(flags={"data": data}, environ=environ, file=file, defaults=defaults, fixed=fixed)
    except HeadraceError as exc:
        yield problem("settings", str(exc), "`headrace serve` would not start.")
        return
    if of_cluster is not None and of_node is not None:
        yield from _check_nodes(settings, of_cluster, of_node, access)
    if settings.object_store is not None:
        yield from check_object_store(settings.object_store)
    directory, num_shards = _check_directory(settings, of_cluster, of_node)
    yield directory
    yield from check_mode(settings.data)
    yield from check_open_files(settings.max_connections)
    yield from check_memory(settings, num_shards)
    yield from check_disk(settings, num_shards)
    yield from check_ports(settings, num_shards)
    yield from check_protection(settings, os.environ)


def _check_nodes(settings: ServerConfig, cluster: ClusterFile, node: ClusterNode, access: Access) -> Iterator[Finding]:
    """Ask as the node will, with its own certificate and token; without them, as the flags say."""
    try:
        context, token = node_credentials(settings, os.environ, authority=settings.tls_peer_authority)
    except HeadraceError as exc:
        yield problem("cluster", str(exc), "`headrace serve` would not start.")
        return
    if context is None and token is None:
        dial = access(format_address(node.host, node.port), timeout_s=_TIMEOUT_S).dial()
    else:
        role = idl.Role.ADMIN  # as which nodes tell each other where shards are
        dial = Dial(ssl_context=context, server_hostname=None, token=token, timeout_s=_TIMEOUT_S, role=role)
    yield from check_nodes(cluster, node, dial)
    if settings.object_store is not None:
        yield from check_claims(settings.object_store, cluster, node, settings.data)


def _check_server(access: StatusAccess) -> Iterator[Finding]:
    states = asyncio.run(ask_shards(access))
    ours = metadata.version("headrace")
    for version in sorted({state.sample.version for state in states if state.sample is not None} - {ours}):
        yield note("server", f"it runs version {version}, this is {ours}", "Update the older one.")
    problems = find_problems(states)
    for found in problems:
        level = Level.NOTE if found.severity is Severity.NOTE else Level.PROBLEM
        yield Finding(subject="server", level=level, text=found.text, advice=found.advice)
    if not problems:
        yield ok("server", f"{counted(len(states), 'shard')} answer{'s' * (len(states) == 1)}, and nothing is wrong")


def check_clock(address: str) -> Finding:
    """Compare this machine's clock with the one that a server's metrics port reports.

    Raises:
        ConfigError: `address` is not a host and port.
    """
    host, port = parse_address(address, default_port=0)
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
    begun_s = time.time()
    try:
        connection.request("GET", "/status.json")
        theirs_s = float(json.loads(connection.getresponse().read())["time_s"])
        if not math.isfinite(theirs_s):  # NaN is apart from no time
            raise ValueError(f"its time_s is {theirs_s}")
    except (OSError, http.client.HTTPException, ValueError, OverflowError, KeyError, TypeError, RecursionError) as exc:
        return problem("clock", f"{address} does not tell its time: {exc}", "Is this its --metrics-port?")
    finally:
        connection.close()
    ended_s = time.time()
    # The server read its clock between our two readings.
    apart_s = max(begun_s - theirs_s, theirs_s - ended_s, 0.0)
    text = f"this clock and the server's are {'less than ' if apart_s < 0.001 else ''}{max(apart_s, 0.001):.3f} s apart"
    if apart_s > MAX_CLOCK_S:
        advice = "Lags and the times of rows are told by both: keep them with NTP."
        return problem("clock", text, advice)
    return ok("clock", text)


def _show(findings: list[Finding], console: Console) -> None:
    # Problems first, because they are why somebody runs this.
    order = [Level.PROBLEM, Level.NOTE, Level.OK]
    for finding in sorted(findings, key=lambda finding: order.index(finding.level)):
        style = _STYLES[finding.level]
        console.print(f"[{style}]{finding.level.value:8}[/{style}] {finding.subject}: {escape(finding.text)}")
        if finding.advice:
            console.print(f"         {escape(finding.advice)}")
