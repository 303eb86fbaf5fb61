"""Dense tensors in flushes: when they go out, what they carry, and which flush is an exact cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense_model import DenseModel, dense_of, tensors_of
from device_flushes import DeviceSubmitted, DeviceTrained
from fake_device import FakeDevice
from scripted_flushes import ScriptedFlushes
from text_scripts import Script, scripts
from torch import nn
from trainer_tables import SMALL_BYTES, Submitted, Trained

from headrace.schemas.errors import ConfigError, NonFiniteError, UnsupportedModelError
from headrace.streamer.flush.layout import Flush
from headrace.streamer.taps.dense_tensors import DenseTensors


def is_exact(flush: Flush | None) -> bool:
    assert flush is not None
    return flush.mark is not None and flush.mark.step == flush.step and flush.mark.is_exact_cut


@scripts(__file__, "dense_copy")
def test_scripts(script: Script) -> None:
    """Dense tensors are in flushes as the scripts say."""
    script.run(ScriptedFlushes())


@pytest.mark.parametrize("num_shards", [1, 3])
def test_every_kind_of_tensor_is_rows_of_its_bytes(num_shards: int) -> None:
    """Tensors of all types and shapes go out whole, each row on its shard, a last row filled up with zeros."""
    model = DenseModel()
    to = Submitted([], num_shards=num_shards)
    tensors = tensors_of(model)
    to.flusher.add_dense(tensors)
    for step in (1, 2):
        to.flusher.flush_all(step, 1.0)
        to.release()
        found = dense_of(to.flushes[-1], tensors, num_shards)
        state = model.state_dict()
        assert found.keys() == {each.path for each in tensors.all}
        for path, tensor in found.items():
            assert tensor.dtype == state[path].dtype
            assert torch.equal(tensor, state[path]), path
        with torch.no_grad():
            for tensor in state.values():
                tensor.copy_(tensor.flip(0))


def test_messages() -> None:
    """Errors that users see name the tensor, and what to do."""
    model = nn.BatchNorm1d(3)
    to, tensors = Submitted([], non_finite="reject"), tensors_of(model)
    to.flusher.add_dense(tensors)
    model.running_var[1] = torch.inf
    with pytest.raises(NonFiniteError, match=r"dense tensor 'running_var': it has NaN or Inf; nothing of this flush"):
        to.flusher.on_step(1)
    model.bias = nn.Parameter(torch.zeros(5))
    with pytest.raises(UnsupportedModelError, match=r"'bias' was float32\[3\] when it was .* and is float32\[5\]"):
        to.flusher.on_step(1)
    with pytest.raises(UnsupportedModelError, match="dense tensor 'weight' of another model is streamed already"):
        to.flusher.check_dense(tensors, max_frame_bytes=2**26)
    with pytest.raises(UnsupportedModelError, match="table 'weight' of another model is streamed already"):
        to.flusher.check_tables([Trained("weight").tapped], max_frame_bytes=2**26)
    with pytest.raises(ConfigError, match="one row of dense tensor 'turned' has 4104 bytes"):
        to.flusher.check_dense(tensors_of(DenseModel()), max_frame_bytes=4096)


@pytest.fixture
def on_device() -> tuple[FakeDevice, DeviceTrained, DeviceSubmitted, DenseTensors]:
    """Return a table on a device, with a flusher of it and of a layer on the host."""
    fake = FakeDevice()
    table = DeviceTrained(fake, num_rows=700, dim=24)
    to = DeviceSubmitted(fake, [table], staging_bytes=SMALL_BYTES, dense_interval_s=1000, non_finite="reject")
    tensors = tensors_of(nn.Linear(3, 2))
    to.flusher.add_dense(tensors)
    return fake, table, to, tensors


def test_with_a_device_the_judgment_comes_later(on_device: Any) -> None:
    """A flush whose device part turns out to leave rows is not exact, and a later one that is has the tensors again."""
    _, table, to, tensors = on_device
    table.update(range(700), 1.0)
    found = []
    for step in range(1, 8):
        to.flusher.on_step(step)  # not `to.on_step`: whoever copies dense tensors may wait for them
        flush = to.complete()
        found.append((bool(dense_of(flush, tensors)), is_exact(flush)))
        to.release()
    assert found[0] == (True, False)
    at = found.index((True, True))
    assert found[1:at] == [(False, False)] * (at - 1)
    assert found[at + 1 :] == [(False, False)] * (6 - at)


def test_flush_all_with_a_device(on_device: Any) -> None:
    """`flush_all` ends in an exact cut that has the dense tensors, however many flushes the device needs."""
    _, table, to, tensors = on_device
    table.update(range(700), 1.0)
    to.flush_all(1)
    assert is_exact(to.flushes[-1])
    assert dense_of(to.flushes[-1], tensors)
    num_flushes = len(to.flushes)
    to.flush_all(2)
    assert len(to.flushes) == num_flushes + 1
    assert dense_of(to.flushes[-1], tensors)


def test_what_fails_on_a_device_gives_the_copy_back(on_device: Any) -> None:
    """A flush that comes to nothing on its device makes the dense tensors due again."""
    _, table, to, tensors = on_device
    table.update([5], float("nan"))
    to.flusher.on_step(1)
    assert to.complete() is None
    with pytest.raises(NonFiniteError):
        to.flusher.on_step(2)
    to.has_returned = False
    table.update([5], 1.0)
    to.flusher.on_step(3)
    flush = to.complete()
    assert dense_of(flush, tensors)
    assert is_exact(flush)
