"""The user's code that the streamer calls runs in the modes that it would have without it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_shard import FakeStore
from streamed_training import Training, streaming

from headrace import SourceRows
from headrace.kernels.plain_context import in_plain_context, users_context

ROWS = [3, 5]


def _modes() -> tuple[Any, ...]:
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return torch.zeros(1).device.type, torch.zeros(1).dtype, torch.is_inference_mode_enabled(), *autocast


class _Source:
    """A table of two rows."""

    def __init__(self) -> None:
        self.seen = set[tuple[Any, ...]]()

    def row_ids(self) -> torch.Tensor:
        self.seen.add(_modes())
        return torch.tensor(ROWS, device="cpu")

    def read(self, row_ids: torch.Tensor) -> SourceRows:
        self.seen.add(_modes())
        is_held = torch.isin(row_ids, torch.tensor(ROWS, device="cpu"))
        return SourceRows(is_held=is_held, weights=torch.ones(int(is_held.sum()), 2, device="cpu"))


CONTEXTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "device": lambda: torch.device("meta"),
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.float16),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_models_sources_and_hooks_run_in_the_programs_modes(
    store: FakeStore, training: Training, tmp_path: Path, context: str
) -> None:
    """A model to record, a source that is read and a hook of evictions; autocast alone is off for a recording."""
    source, answering, evicting = _Source(), list[tuple[Any, ...]](), list[tuple[Any, ...]]()

    def answer(*_: Any) -> torch.Tensor:
        answering.append(_modes())
        assert not torch.is_grad_enabled()
        return torch.ones(1, device="cpu")

    with streaming(store, training, recordings=str(tmp_path)) as streamer:
        streamer.register_pre_eviction_hook(lambda *_: evicting.append(_modes()))
        training.step()
        (table, *_) = streamer.tables
        with CONTEXTS[context]():
            there = _modes()
            items = streamer.attach_source("items", source)
            items.mark(ROWS)
            streamer.evict(table.spec.fqn, [0])
            assert streamer.record(torch.ones(1, device="cpu"), answer)
            streamer.flush()
            assert _modes() == there
        assert source.seen == {there} and evicting == [there]
        is_autocast = context == "autocast"
        assert [seen[:3] for seen in answering] == [there[:3]] and answering[0][3] is False and there[3] is is_autocast


def test_contexts_nest() -> None:
    """Headrace's code is in a plain context, also where the user's code calls it from one; the user's code never is."""

    @in_plain_context
    def ours(depth: int) -> list[str]:
        seen = [torch.zeros(1).device.type]
        with users_context():
            seen.append(torch.zeros(1).device.type)
            with users_context():
                seen.append(torch.zeros(1).device.type)
            return seen + (ours(depth - 1) if depth else [])

    with torch.device("meta"):
        assert ours(1) == ["cpu", "meta", "meta"] * 2
    assert ours(0) == ["cpu"] * 3
