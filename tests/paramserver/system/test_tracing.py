"""Spans are OpenTelemetry's when it is there, and nothing when it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.paramserver.system import tracing
from headrace.paramserver.system.tracing import span

trace = pytest.importorskip("opentelemetry.trace", reason="needs the extra otel")
pytest.importorskip("opentelemetry.sdk.trace", reason="needs opentelemetry-sdk")


class _Spans:
    """What has been recorded since it was made."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def get_tracer(self, name: str) -> Any:
        return self.provider.get_tracer(name)

    @property
    def finished(self) -> list[Any]:
        return list(self._exporter.get_finished_spans())


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> _Spans:
    made = _Spans()
    monkeypatch.setattr(tracing, "_trace", made)  # the process's own provider can be set once only
    return made


def test_span(spans: _Spans) -> None:
    """A span has its name, its attributes and its parent, and notes what was raised in it."""
    with span("headrace.outer", run="ctr"), pytest.raises(ValueError, match="no"), span("headrace.inner", rows=7):
        raise ValueError("no")
    inner, outer = spans.finished
    assert (outer.name, dict(outer.attributes)) == ("headrace.outer", {"headrace.run": "ctr"})
    assert inner.parent.span_id == outer.context.span_id
    assert not inner.status.is_ok
    assert outer.status.is_ok


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without OpenTelemetry a span is nothing, and what is raised in it comes through."""
    monkeypatch.setattr(tracing, "_trace", None)
    with pytest.raises(ValueError, match="no"), span("headrace.flush", step=1):
        raise ValueError("no")


def test_pipeline(tmp_path: Path, spans: _Spans) -> None:
    """A flush, and what a shard takes and gives, are spans with what they are of."""
    import asyncio
    import threading

    import torch
    from shard_servers import serve_shards

    from headrace import RawEmbeddingStreamer
    from headrace.paramserver.replica import EmbeddingReplica

    ports: list[int] = []
    is_ready, is_over = threading.Event(), threading.Event()

    async def serve() -> None:
        async with serve_shards(tmp_path, 1) as opened:
            ports.extend(opened)
            is_ready.set()
            await asyncio.to_thread(is_over.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert is_ready.wait(60)
        model = torch.nn.ModuleDict({"user": torch.nn.EmbeddingBag(50, 4, sparse=True)})
        with RawEmbeddingStreamer(f"127.0.0.1:{ports[0]}", run="ctr") as streamer:
            streamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), publish="all")
            streamer.flush()
        with EmbeddingReplica(f"127.0.0.1:{ports[0]}"):
            pass
    finally:
        is_over.set()
        thread.join()
    by_name = {found.name: dict(found.attributes) for found in spans.finished}
    assert by_name["headrace.flush"] == {"headrace.run": "ctr", "headrace.step": 0}
    assert by_name["headrace.setEmbeddings"]["headrace.shard"] == 0
    assert by_name["headrace.setEmbeddings"]["headrace.frame_bytes"] > 50 * 4 * 4
    assert by_name["headrace.fetchUpdates"]["headrace.from_seq"] >= 1
