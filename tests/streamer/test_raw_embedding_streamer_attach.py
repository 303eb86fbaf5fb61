"""What can be attached to a streamer, and what is refused, with the model left as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_shard import FakeStore
from spent_deadline import spent_deadline
from streamed_training import FAST, Training, compare, streaming
from torch import nn

from headrace.schemas.errors import ConfigError, SpecMismatchError, UnavailableError, UnsupportedModelError
from headrace.streamer import RawEmbeddingStreamer


def test_mismatch_at_attach_leaves_nothing_attached(store: FakeStore, training: Training) -> None:
    """A table that the server has otherwise is told at `attach`; the model is as before and can be attached later."""
    with streaming(store, training) as first:
        first.flush()
    changed = Training()
    changed.model.user = nn.Embedding(300, 9, sparse=True)
    changed.optimizer = torch.optim.Adagrad(changed.model.parameters(), lr=0.1)
    streamer = RawEmbeddingStreamer(store.address, run="other", **FAST)
    with pytest.raises(SpecMismatchError, match=r"'user\.weight': dim 8 ≠ 9"):
        streamer.attach(changed.model, changed.optimizer)
    assert streamer.tables == []
    changed.step()
    streamer.flush()
    assert not any(batch.rows for batch in store.received)
    streamer.attach(training.model, training.optimizer)
    streamer.close()


def test_model_without_tables_is_refused(store: FakeStore) -> None:
    """A model that has nothing to stream is refused with the reason."""
    model = nn.Linear(2, 2)
    with RawEmbeddingStreamer(store.address, run="test", **FAST) as streamer:
        with pytest.raises(UnsupportedModelError):
            streamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(ConfigError, match="publish"):
            streamer.attach(model, None, publish="some")  # type: ignore[arg-type]


def test_what_is_no_model_and_no_optimizer_is_refused(store: FakeStore, training: Training) -> None:
    """Arguments in the wrong order or of the wrong kind are told in one line, which says what to give."""
    model, optimizer = training.model, training.optimizer
    with RawEmbeddingStreamer(store.address, run="test", **FAST) as streamer:
        attach: Any = streamer.attach
        for arguments, message in [
            ((optimizer, model), "optimizer: a Model is none; give the torch.optim.Optimizer"),
            ((optimizer,), "model is a Adagrad: give the nn.Module"),
            ((model.state_dict(), optimizer), "model is a OrderedDict"),
            ((model, model.parameters()), "optimizer: a Parameter is none"),
            ((model, {"tables": optimizer}), "optimizer: a dict is none"),
            ((model, 0.1), "optimizer: a float is none"),
        ]:
            with pytest.raises(ConfigError, match=message) as caught:
                attach(*arguments)
            assert "\n" not in str(caught.value)
        assert streamer.tables == []


@pytest.mark.parametrize(
    ("change", "now"),
    [
        (lambda model: model.to(torch.bfloat16), r"bfloat16\[300, 8\]"),
        (lambda model: setattr(model.user.weight, "data", torch.zeros(400, 8)), r"float32\[400, 8\]"),
    ],
)
def test_table_that_is_another_now_is_refused(
    store: FakeStore, training: Training, change: Callable[[nn.Module], object], now: str
) -> None:
    """A table whose type or shape was changed under the streamer is an error that names both, and sends nothing."""
    streamer = RawEmbeddingStreamer(store.address, run="test", **FAST)
    streamer.attach(training.model, training.optimizer)
    change(training.model)
    with pytest.raises(UnsupportedModelError, match=rf"'user\.weight' was float32\[300, 8\] .* {now} now"):
        streamer.flush()
    streamer.close(flush=False)
    assert not any(batch.rows for batch in store.received)


def test_rows_of_a_former_run_are_told_once(
    store: FakeStore, training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    """A table that the store has from a former run may differ there: said at the first step, unless all is sent."""
    with streaming(store, training) as first:
        training.step()
        first.flush()
    assert "before this run" not in caplog.text
    again = Training(seed=1)
    with streaming(store, again):
        again.step()
        again.step()
    assert caplog.text.count("the store had items.weight, user.weight before this run") == 1
    caplog.clear()
    with RawEmbeddingStreamer(store.address, run="test", **FAST) as streamer:
        streamer.attach(training.model, training.optimizer, publish="all")
        training.step()
        state = streamer.state_dict()
    resumed = Training()
    with RawEmbeddingStreamer(store.address, run="test", **FAST) as streamer:
        streamer.attach(resumed.model, resumed.optimizer)
        streamer.load_state_dict({**state, "server_ids": ["another"]})  # sends every row
        resumed.step()
    assert "before this run" not in caplog.text


def test_second_table_of_a_name_is_refused(store: FakeStore, training: Training) -> None:
    """Two models whose tables have the same names would overwrite each other's rows: the second is refused."""
    with streaming(store, training) as streamer:
        other = Training(seed=1)
        with pytest.raises(UnsupportedModelError, match=r"'user\.weight' of another model is streamed already"):
            streamer.attach(other.model, other.optimizer)
        wrapped = nn.ModuleDict({"other": other.model})
        streamer.attach(wrapped, other.optimizer)
        training.step()
        other.step()
        streamer.flush()
        result = compare(streamer, store)
        assert result.is_equal
        assert len(result.tables) == 4


def test_attach_waits_for_a_shard_that_restarts(store: FakeStore, training: Training) -> None:
    """A shard that is away for a moment delays `attach`; one that stays away fails it, with nothing attached."""
    hasty = RawEmbeddingStreamer(store.address, run="hasty", **{**FAST, "connect_timeout_s": 30.0})
    streamer = RawEmbeddingStreamer(store.address, run="test", **FAST)
    store.do(store.shards[2].stop)
    with spent_deadline(), pytest.raises(UnavailableError, match=r"a shard does not answer within 30 s"):
        hasty.attach(training.model, training.optimizer)
    assert hasty.tables == []
    hasty.close(flush=False)
    starter = threading.Thread(target=lambda: store.do(store.shards[2].start))
    starter.start()
    streamer.attach(training.model, training.optimizer)
    starter.join()
    training.step()
    streamer.close()
    assert compare(streamer, store).is_equal
