"""Settings of a streamer, and arguments that are checked when a method is called."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_shard import FakeStore
from set_back_training import Trainer
from streamed_training import FAST, Training, attached, streaming

from headrace.paramserver.replica.api.config import ReplicaConfig, ReplicaSettings
from headrace.schemas.errors import ConfigError, RequestError
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.config import StreamerConfig, StreamerSettings, step_number, timeout_seconds
from headrace.streamer.delivery.rendezvous import tls_context

TLS = Path(__file__).parents[1] / "paramserver" / "tls"


def test_nearer_source_wins(tmp_path: Path) -> None:
    """Arguments override the environment, the environment the file, and the file the defaults."""
    file = tmp_path / "streamer.yaml"
    file.write_text("policy: block\nstaging_bytes: 1MiB\nretry_max_s: 7\n")
    environ = {"HEADRACE_STREAMER_STAGING_BYTES": "2MiB", "HEADRACE_STREAMER_RETRY_MAX_S": "8s", "OTHER": "x"}
    config = StreamerConfig.load(environ=environ, file=file, retry_max_s=9)
    assert (config.policy, config.staging_bytes, config.retry_max_s) == ("block", 2 * 2**20, 9)
    assert config.message_bytes == 4 * 2**20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"polcy": "block"}, "'polcy' is no setting; did you mean 'policy'"),
        ({"policy": "drop"}, "not one of coalesce, block"),
        ({"staging_bytes": 1}, "less than 64KiB"),
        ({"retry_min_s": 9, "retry_max_s": 1}, "retry_max_s: 1 is less than retry_min_s"),
        ({"window_messages": 0}, "^window_messages: 0 is less than 1"),  # as Python has it, not as a flag
    ],
)
def test_wrong_setting_is_one_line(settings: dict[str, object], message: str) -> None:
    """A wrong setting is a one-line error that names it."""
    with pytest.raises(ConfigError, match=message) as caught:
        StreamerConfig.load(environ={}, **settings)
    assert "\n" not in str(caught.value)


def test_files_for_tls_imply_it() -> None:
    """A file alone turns TLS on; without files and the setting there is none."""
    config = StreamerConfig.load(environ={}, tls_authority=TLS / "authority.pem")
    assert tls_context(config) is not None
    assert tls_context(StreamerConfig.load(environ={}, tls=True)) is not None
    assert tls_context(StreamerConfig.load(environ={})) is None


def test_editors_know_all_settings() -> None:
    """The typed keyword arguments of streamer and replica are the fields of their settings, and no others."""
    for typed, config in ((StreamerSettings, StreamerConfig), (ReplicaSettings, ReplicaConfig)):
        assert list(typed.__annotations__) == [field.name for field in dataclasses.fields(config)]


def test_unknown_variable_is_an_error() -> None:
    """A misspelled variable is refused, and the right one suggested."""
    with pytest.raises(ConfigError, match="did you mean HEADRACE_STREAMER_POLICY"):
        StreamerConfig.load(environ={"HEADRACE_STREAMER_POLICI": "block"})


@pytest.mark.parametrize("step", [7, np.int64(7), np.array(7), torch.tensor(7), torch.tensor([7])], ids=repr)
def test_a_step_is_any_integer_and_kept_as_a_plain_one(step: Any) -> None:
    """Any kind of integer becomes an int, for messages and checkpoints."""
    number = step_number(step, after=7)
    assert (type(number), number) == (int, 7)


@pytest.mark.parametrize("step", [4.5, 4.0, float("nan"), "5", np.array([5, 6]), torch.tensor(5.0), None], ids=repr)
def test_what_is_no_integer_is_no_step(step: Any) -> None:
    """Anything else than an integer is refused."""
    with pytest.raises(ConfigError, match="is not a whole number: give an int"):
        step_number(step, after=0)


@pytest.mark.parametrize("step", [6, -1, 2**62 + 1, 2**63])
def test_steps_only_rise(step: int) -> None:
    """A step below the last one, or beyond what a message can hold, is refused."""
    with pytest.raises(ConfigError, match=f"step {step} after step 7: steps only rise"):
        step_number(step, after=7)


@pytest.mark.parametrize(
    ("address", "message"),
    [(wrong, "address .* is not text") for wrong in (7601, ("127.0.0.1", 7601), b"127.0.0.1")]
    + [(None, "which server.*HEADRACE_SERVER")]
    + [(wrong, "is not an address") for wrong in ("", "host:port", "127.0.0.1:0", "http://x:1")]
    + [("127.0.0.1:99999", "ports end at 65535")],
)
def test_bad_address_is_refused(address: Any, message: str) -> None:
    """Anything else than an address is refused."""
    with pytest.raises(ConfigError, match=message):
        RawEmbeddingStreamer(address, run="test")


@pytest.mark.parametrize("run", [None, 7, b"run", "", "x" * 257, "ä" * 129, "two\nlines", "half\ud800"])
def test_bad_run_is_refused(run: Any) -> None:
    """A run's name is a short, printable line; others are refused before any connection."""
    with pytest.raises(ConfigError, match=r"^run "):
        RawEmbeddingStreamer("127.0.0.1:1", run=run)


@pytest.mark.parametrize("timeout_s", ["3s", pytest.param(object(), id="object"), math.nan, math.inf], ids=str)
def test_a_timeout_is_a_number_of_seconds(store: FakeStore, training: Training, timeout_s: Any) -> None:
    """`flush`, `audit` and `close` refuse other timeouts; `close` closes all the same."""
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


def test_names_of_tables_are_text(store: FakeStore, training: Training) -> None:
    """Anything else than a list of strings is refused, and nothing is attached."""
    with RawEmbeddingStreamer(store.address, run="test", **FAST) as streamer:
        with pytest.raises(ConfigError, match=r"tables \['user\.weight', 3\] are not all names"):
            streamer.attach(training.model, training.optimizer, tables=["user.weight", 3], publish="updated")  # type: ignore[list-item]
        with pytest.raises(ConfigError, match="tables 3 is not a list"):
            streamer.attach(training.model, training.optimizer, tables=3, publish="updated")  # type: ignore[arg-type]
        assert not streamer.tables


def test_rows_are_named_by_integers(store: FakeStore) -> None:
    """`evict` and `fetch` take integers in lists, arrays and tensors, and refuse masks and fractions."""
    trainer = Trainer("named", 100)
    with attached(store.address, trainer, run="named", **FAST) as streamer:
        for wrong in (torch.zeros(100, dtype=torch.bool), torch.tensor([1.5]), [0.5], None):
            with pytest.raises(RequestError, match="not integers"):
                streamer.evict(trainer.fqn, wrong)  # type: ignore[arg-type]
            with pytest.raises(RequestError, match="not integers"):
                streamer.fetch(trainer.fqn, wrong)  # type: ignore[arg-type]
        assert not streamer.stats().num_dirty_rows
        for given in ([3, 4], np.array([3, 4], np.int32), torch.tensor([[3], [4]])):
            assert torch.equal(streamer.fetch(trainer.fqn, given).weights, trainer.table.weight.detach()[[3, 4]])
            assert streamer.evict(trainer.fqn, given) == 2
