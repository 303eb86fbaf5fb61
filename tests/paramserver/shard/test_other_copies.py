"""A node that would begin a shard without a row asks the others first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from held_ports import hold_ports
from shard_servers import serve_shards

from headrace.paramserver.config.cluster_file import ClusterFile
from headrace.paramserver.reading.link import Dial
from headrace.paramserver.shard.other_copies import check_nobody_has
from headrace.schemas.errors import ConfigError

_SERVER_ID = "3f0c6e0e-8a55-4c6f-9f0f-2d6a6a1f7a11"


async def test_a_shard_that_is_elsewhere_is_not_begun(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another node that knows it at another place refuses the start; nodes that do not answer are named, and do not."""
    port = hold_ports(2)
    host = {"host": "127.0.0.1"}
    nodes = {"a": {**host, "port": port, "shards": [0]}, "b": {**host, "port": port + 1, "shards": [1]}}
    (tmp_path / "cluster.yaml").write_text(json.dumps({"server_id": _SERVER_ID, "shards": 2, "nodes": nodes}))
    cluster = ClusterFile.load(tmp_path / "cluster.yaml")
    dial = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=5.0)
    await check_nobody_has(cluster, cluster.node("a"), dial)
    assert "does not answer" in caplog.text and "b" in caplog.text
    for at, is_refused in ((cluster.addresses[0], False), (("127.0.0.1", 1), True)):
        here = {"server_id": _SERVER_ID, "shard": 1, "addresses": (at, cluster.addresses[1]), "nodes": ("a", "b")}
        async with serve_shards(tmp_path / "b", 1, port=port + 1, **here):
            if not is_refused:
                await check_nobody_has(cluster, cluster.node("a"), dial)
                continue
            with pytest.raises(ConfigError, match=r"shard 0 is at 127\.0\.0\.1:1, as node b says; .* and it follows$"):
                await check_nobody_has(cluster, cluster.node("a"), dial)
