"""The benches' object server; what it answers is tested with the object store that uses it."""

from __future__ import annotations

import http.client

import pytest

from headrace.paramserver.system.object_store import ObjectStore
from headrace.scripts.benches.object_server import StoreProcess

MIB = 1 << 20


def test_the_oldest_large_objects_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is a process of its own, counts what it is sent, and keeps small objects and the newest large ones."""
    with StoreProcess(keep_bytes=5 * MIB) as server:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        store = ObjectStore.of_url(server.url)
        store.put("claims/1", b"small")
        for number in range(4):
            store.put(f"archive/{number}", bytes([number]) * 2 * MIB)
        assert server.sizes("claims", "archive") == {
            "prefix/claims/1": 5,
            "prefix/archive/2": 2 * MIB,
            "prefix/archive/3": 2 * MIB,
        }
        assert server.sent_bytes == 8 * MIB + 5
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        connection.request("GET", "/bucket/prefix/archive/3")
        assert connection.getresponse().read() == bytes([3]) * 2 * MIB
        connection.close()
