"""A running server with a metrics port, plain HTTP to it, and a writer that says hello."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hellos import hello_of_writer
from prometheus_client.parser import text_string_to_metric_families
from waiting import WAIT_S, wait_until

from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.tables import TableSpec

__all__ = ["WAIT_S", "get", "get_json", "say_hello", "scrape", "wait_until", "watched_server"]


@contextlib.contextmanager
def watched_server(data: Path, **settings: Any) -> Iterator[tuple[ServerProcess, str]]:
    """Run a server; yield it and the address of its metrics."""
    with ServerProcess.start(data, metrics_port=0, **settings) as server:
        (address,) = [f["address"] for f in server.read_log() if f["message"] == "metrics are served"]
        yield server, address


def get(address: str, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
    """Return status, headers and body of one GET."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read().decode()
    finally:
        connection.close()


def get_json(address: str, path: str) -> Any:
    """Return what a page of JSON says."""
    status, _, body = get(address, path)
    assert status == 200, body
    return json.loads(body)


def scrape(address: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Return the values of each sample of a page of metrics, by its sorted labels."""
    _, _, body = get(address, "/metrics")
    values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(body):
        for sample in family.samples:
            values.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return values


async def say_hello(address: str, specs: Sequence[TableSpec], *, run: str = "ctr-v7", client: str = "rank0") -> None:
    """Register tables on every shard, as a trainer does that goes away at once."""
    request = hello_of_writer(*specs, run=run, client=client, epoch=3)
    async with await ParamServerClient.connect(*parse_address(address, default_port=0), timeout_s=WAIT_S) as first:
        shards = (await first.hello(request, timeout_s=WAIT_S)).shards
    for shard in shards:
        async with await ParamServerClient.connect(shard.host, shard.port, timeout_s=WAIT_S) as connection:
            await connection.hello(request, timeout_s=WAIT_S)
