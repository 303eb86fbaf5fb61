"""What callers hand to the streamer is checked at the call."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from evicting_training import Evicting
from fake_shard import FakeStore
from streamed_training import FAST, Training, streaming

from headrace.schemas.errors import ConfigError, RequestError
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.call_arguments import step_number, timeout_seconds


@pytest.mark.parametrize("step", [7, np.int64(7), np.array(7), torch.tensor(7), torch.tensor([7])], ids=repr)
def test_a_step_is_any_integer_and_kept_as_a_plain_one(step: Any) -> None:
    """Messages and checkpoints hold an int, whatever was given."""
    number = step_number(step, after=7)
    assert (type(number), number) == (int, 7)


@pytest.mark.parametrize("step", [4.5, 4.0, float("nan"), "5", np.array([5, 6]), torch.tensor(5.0), None], ids=repr)
def test_what_is_no_integer_is_no_step(step: Any) -> None:
    """It could not be encoded, and would be tried again for good."""
    with pytest.raises(ConfigError, match="is not a whole number: give an int"):
        step_number(step, after=0)


@pytest.mark.parametrize("step", [6, -1, 2**62 + 1, 2**63])
def test_steps_only_rise(step: int) -> None:
    """Below the last one, and beyond what a message can hold, there is no step."""
    with pytest.raises(ConfigError, match=f"step {step} after step 7: steps only rise"):
        step_number(step, after=7)


def test_wrong_steps_leave_the_streamer_as_it_was(store: FakeStore, training: Training) -> None:
    """After a refused step streaming goes on; a step that is numpy's leaves a checkpoint of plain values."""
    with streaming(store, training) as streamer:
        training.step()
        with pytest.raises(ConfigError, match=r"step 4\.5 is not a whole number"):
            streamer.step(4.5)  # type: ignore[arg-type]
        streamer.step(np.int64(5))
        training.step()
        streamer.flush()
        state = streamer.state_dict()
        assert (type(state["step"]), state["step"]) == (int, 6)
        assert b"numpy" not in pickle.dumps(state)


@pytest.mark.parametrize("address", [None, 7601, ("127.0.0.1", 7601), b"127.0.0.1"], ids=repr)
def test_an_address_is_text(address: Any) -> None:
    """What is none is refused in a line."""
    with pytest.raises(ConfigError, match=r"address .* is no text"):
        RawEmbeddingStreamer(address, run="test")


@pytest.mark.parametrize("run", [None, 7, b"run"], ids=repr)
def test_a_run_is_text(run: Any) -> None:
    """What is none is refused in a line, before any connection."""
    with pytest.raises(ConfigError, match=r"run .* is no text"):
        RawEmbeddingStreamer("127.0.0.1:1", run=run)


@pytest.mark.parametrize("timeout_s", ["3s", pytest.param(object(), id="object"), math.nan, math.inf], ids=str)
def test_a_timeout_is_a_number_of_seconds(store: FakeStore, training: Training, timeout_s: Any) -> None:
    """Of `flush`, `audit` and `close`; the streamer is closed all the same."""
    with pytest.raises(ConfigError, match=r"timeout_s .*: give seconds"):
        timeout_seconds(timeout_s)
    with streaming(store, training) as streamer:
        with pytest.raises(ConfigError, match="give seconds"):
            streamer.flush(timeout_s)
        with pytest.raises(ConfigError, match="give seconds"):
            streamer.audit(timeout_s=timeout_s)
        training.step()
        with pytest.raises(ConfigError, match="give seconds"):
            streamer.close(timeout_s=timeout_s)
        with pytest.raises(ConfigError, match="this streamer is closed"):
            streamer.flush()


@pytest.mark.parametrize("run", ["", "x" * 2000, "two\nlines", "half\ud800", 3])
def test_a_run_has_a_name_that_can_be_printed_and_sent(run: Any) -> None:
    """Anything else is refused before anybody is called."""
    with pytest.raises(ConfigError, match=r"^run "):
        RawEmbeddingStreamer("127.0.0.1:1", run=run)


def test_names_of_tables_are_text(store: FakeStore, training: Training) -> None:
    """A number among them is refused, and nothing is attached."""
    with RawEmbeddingStreamer(store.address, run="test", **FAST) as streamer:
        with pytest.raises(ConfigError, match=r"tables \['user\.weight', 3\] are not all names"):
            streamer.attach(training.model, training.optimizer, tables=["user.weight", 3])  # type: ignore[list-item]
        with pytest.raises(ConfigError, match="tables 3 is no list"):
            streamer.attach(training.model, training.optimizer, tables=3)  # type: ignore[arg-type]
        assert not streamer.tables


def test_rows_are_named_by_integers(store: FakeStore) -> None:
    """`evict` and `fetch` take lists and arrays too, and refuse masks and fractions, which would name other rows."""
    trainer = Evicting("named")
    with RawEmbeddingStreamer(store.address, run="named", **FAST) as streamer:
        streamer.attach(trainer.model, trainer.optimizer)
        for wrong in (torch.zeros(100, dtype=torch.bool), torch.tensor([1.5]), [0.5], None):
            with pytest.raises(RequestError, match="not integers"):
                streamer.evict(trainer.fqn, wrong)  # type: ignore[arg-type]
            with pytest.raises(RequestError, match="not integers"):
                streamer.fetch(trainer.fqn, wrong)  # type: ignore[arg-type]
        assert not streamer.stats().num_dirty_rows
        for given in ([3, 4], np.array([3, 4], np.int32), torch.tensor([[3], [4]])):
            assert torch.equal(streamer.fetch(trainer.fqn, given).weights, trainer.table.weight.detach()[[3, 4]])
            assert streamer.evict(trainer.fqn, given) == 2
