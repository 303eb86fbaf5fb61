"""What a PubAck means: `strace` sees a majority of the servers sync each message before its ack."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from nats_cluster import access_of, nats_cluster, needs_nats_server
from nats_servers import NatsServers

from headrace.paramserver.log.jetstream.engine import PublishOutcome
from headrace.paramserver.log.jetstream.nats_stream import open_engine

pytestmark = [
    needs_nats_server,
    pytest.mark.skipif(shutil.which("strace") is None, reason="there is no strace here"),
]
# `1795632910.410819 fsync(20) = 0 <0.000893>`, or the second half of it when another thread came in between.
_SYNC = re.compile(r"\d+ +(\d+\.\d+) (<\.\.\. )?f(?:data)?sync(?: resumed>.*|\(\d+\)) += 0 <(\d+\.\d+)>")


@contextmanager
def _traced(servers: NatsServers, folder: Path) -> Iterator[dict[str, Path]]:
    """Trace the syncs of all servers; yield the file of each, complete at the end."""
    files, tracers = {}, []
    try:
        for server in servers.servers:
            files[server.name] = folder / f"{server.name}.strace"
            command = ["strace", "-f", "-ttt", "-T", "-e", "trace=fsync,fdatasync", "-o", str(files[server.name])]
            tracer = subprocess.Popen([*command, "-p", str(server.pid)], stderr=subprocess.PIPE)
            tracers.append(tracer)
            assert tracer.stderr is not None
            line = tracer.stderr.readline().decode()
            if "attached" not in line:
                pytest.skip(f"strace may not trace here: {line.strip()}")
        yield files
    finally:
        for tracer in tracers:
            tracer.send_signal(signal.SIGINT)
            tracer.wait()
            assert tracer.stderr is not None
            tracer.stderr.close()


def _syncs_of(path: Path) -> list[tuple[float, float]]:
    """Return when each sync began and ended, seconds since 1970."""
    syncs = []
    for match in filter(None, map(_SYNC.match, path.read_text("utf-8").splitlines())):
        at_s, took_s = float(match[1]), float(match[3])
        syncs.append((at_s - took_s, at_s) if match[2] else (at_s, at_s + took_s))
    return syncs


async def test_each_ack_follows_a_sync_on_two_of_three_servers(tmp_path: Path) -> None:
    """With `sync_interval: always` no message is acked before two servers have synced after it was sent."""
    moments = []
    with nats_cluster(tmp_path / "nats") as servers:
        engine = await open_engine(access_of(servers), server_id="s", shard=0, max_bytes=1 << 24)
        connection = await engine.connect()
        with _traced(servers, tmp_path) as files:
            for last in range(20):
                begin_s = time.time()
                reply = await connection.publish_batch([bytes(1000)], expected_last=last)
                moments.append((begin_s, time.time()))
                assert (reply.outcome, reply.seq) == (PublishOutcome.ACKED, last + 1)
        await connection.close()
    syncs = [_syncs_of(path) for path in files.values()]
    for begin_s, end_s in moments:
        in_time = [any(begin_s <= began_s and ended_s <= end_s for began_s, ended_s in of) for of in syncs]
        assert sum(in_time) >= 2
