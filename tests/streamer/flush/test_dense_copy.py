"""Dense tensors in flushes: when they go out, what they carry, and which flush is an exact cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dense_model import DenseModel, dense_of, tensors_of
from device_flushes import DeviceSubmitted, DeviceTrained
from fake_device import FakeDevice
from torch import nn
from trainer_tables import SMALL_BYTES, WIDE, Submitted, Trained, taken

from headrace.schemas.errors import ConfigError, NonFiniteError, UnavailableError, UnsupportedModelError
from headrace.streamer.flush.layout import Flush
from headrace.streamer.taps.dense_tensors import DenseTensors


class Costly(DenseTensors):
    """Tensors whose copy takes time on a fake clock.

    Attributes:
        on_copy: Called by each copy.
    """

    on_copy: Callable[[], None] = staticmethod(lambda: None)

    def live(self) -> dict[str, torch.Tensor]:
        self.on_copy()
        return super().live()


class Publishing:
    """A table of rows, a layer, and a flusher of both with a clock.

    Attributes:
        now_s: The clock.
        copy_s: What a copy of the layer takes.
    """

    def __init__(self, num_rows: int = 50, *, model: nn.Module | None = None, **settings: Any) -> None:
        self.now_s, self.copy_s = 100.0, 0.0
        self.table = Trained(num_rows=num_rows, dim=WIDE)
        self.model = nn.Linear(3, 2) if model is None else model
        self.tensors = Costly(self.model, (), model_name="default", names=None, table_paths=(), has_states=False)
        self.to = Submitted([self.table], clock=lambda: self.now_s, **settings)
        self.to.flusher.check_dense(self.tensors, max_frame_bytes=2**26)
        self.to.flusher.add_dense(self.tensors)
        self.tensors.on_copy = self._copy

    def _copy(self) -> None:
        self.now_s += self.copy_s

    def step(self, step: int) -> Flush | None:
        """Change the layer and end a step; return its flush."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(float(step))
        self.to.flusher.on_step(step)
        flush = self.to.flushes[-1] if self.to.flushes else None
        return flush if flush is not None and flush.step == step else None

    def sent(self, flush: Flush | None) -> dict[str, torch.Tensor]:
        return {} if flush is None else dict(dense_of(flush, self.tensors))


def is_exact(flush: Flush | None) -> bool:
    assert flush is not None
    return flush.mark is not None and flush.mark.step == flush.step and flush.mark.is_exact_cut


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


def test_dense_tensors_go_out_by_their_own_clock() -> None:
    """They are in the first flush and then in one an interval, between which rows go out at every step."""
    publishing = Publishing(dense_interval_s=10)
    with_dense = []
    for step in range(1, 26):
        publishing.table.mark([step])
        flush = publishing.step(step)
        assert flush is not None
        assert taken(flush) == [step]
        publishing.to.release()
        if found := publishing.sent(flush):
            with_dense.append(step)
            assert found["weight"].unique().tolist() == [step]
        assert flush.mark is not None
        assert (flush.mark.step, flush.mark.is_exact_cut) == (step, bool(found))
        publishing.now_s += 1
    assert with_dense == [1, 11, 21]
    assert publishing.to.flusher.dense_step == 21


def test_a_costly_copy_is_rare_and_slows_no_rows_down() -> None:
    """At ten percent, a copy of 2 s goes out every 20 s, and rows that cost 0.1 s every second, as without it."""
    publishing = Publishing(dense_interval_s=10, max_cost_percent=10)
    publishing.copy_s = 2.0
    publishing.to.cost = lambda: setattr(publishing, "now_s", publishing.now_s + 0.1)
    at = {True: [], False: []}
    begin_s = publishing.now_s
    for step in range(1, 700):
        publishing.table.mark([step % 50])
        began_s = publishing.now_s
        if flush := publishing.step(step):
            at[bool(publishing.sent(flush))].append(round(began_s - begin_s, 1))
            publishing.to.release()
        publishing.now_s = round(publishing.now_s + 0.1, 3)
    dense, rows = at[True], at[False]
    assert all(20 <= later - earlier <= 20.2 for earlier, later in itertools.pairwise(dense))
    assert len(dense) > 2
    gaps = [later - earlier for earlier, later in itertools.pairwise(rows)]
    assert sorted(gaps)[len(gaps) // 2] <= 1.2


def test_dense_tensors_wait_for_no_row_flush() -> None:
    """They go out when they are due, although rows are not, and take the rows along."""
    publishing = Publishing(dense_interval_s=10, freshness_s=60)
    publishing.to.cost = lambda: setattr(publishing, "now_s", publishing.now_s + 1)
    assert publishing.sent(publishing.step(1))
    publishing.to.release()
    publishing.table.mark([4])
    publishing.now_s += 5
    assert publishing.step(2) is None
    publishing.now_s += 5
    flush = publishing.step(3)
    assert publishing.sent(flush) and is_exact(flush)
    assert flush is not None and taken(flush) == [4]


def test_while_the_copy_is_on_its_way_it_stays_due() -> None:
    """A copy is not overwritten before it is durable; meanwhile rows go out, in no exact cut."""
    publishing = Publishing(dense_interval_s=0)
    first = publishing.step(1)
    assert publishing.sent(first) and is_exact(first)
    publishing.table.mark([3])
    second = publishing.step(2)
    assert not publishing.sent(second) and not is_exact(second)
    assert publishing.sent(first)["weight"].unique().tolist() == [1.0]
    publishing.to.release()
    third = publishing.step(3)
    assert publishing.sent(third) and is_exact(third)


def test_a_flush_pass_ends_in_an_exact_cut() -> None:
    """When rows take several flushes, the dense tensors go out when due, and again with the one that is exact."""
    publishing = Publishing(num_rows=2000, staging_bytes=SMALL_BYTES, dense_interval_s=1000)
    publishing.table.mark(range(2000))
    found = []
    for step in range(1, 6):
        flush = publishing.step(step)
        assert flush is not None
        found.append((bool(publishing.sent(flush)), is_exact(flush)))
        publishing.to.release()
    assert found == [(True, False), (False, False), (True, True), (False, False), (False, False)]


def test_flush_all_ends_in_an_exact_cut_with_dense_tensors() -> None:
    """`flush_all` sends them each time, whatever the clock says, and ends in an exact cut that has them."""
    publishing = Publishing(num_rows=1500, staging_bytes=SMALL_BYTES, dense_interval_s=1000)
    publishing.step(1)
    for value in (5.0, 6.0):
        publishing.to.release()
        publishing.table.mark(range(1500))
        publishing.model.weight.data.fill_(value)
        publishing.to.flusher.flush_all(1, 1.0)
        last = publishing.to.flushes[-1]
        assert is_exact(last)
        assert publishing.sent(last)["weight"].unique().tolist() == [value]
    # Not `sent`: the buffers of earlier flushes hold later rows by now.
    carried = [any(table.format.spec.is_dense for table in flush.tables) for flush in publishing.to.flushes]
    assert sum(carried) == 3


def test_flush_all_waits_for_the_last_copy() -> None:
    """A copy that does not become durable in time is an error that names the shard."""
    publishing = Publishing()
    publishing.step(1)
    with pytest.raises(UnavailableError, match="earlier dense parameters are on their way: shard 0 is behind"):
        publishing.to.flusher.flush_all(1, 0.01)


def test_a_flush_that_fails_gives_the_copy_back() -> None:
    """When the sender refuses a flush, its rows are dirty, its buffers free and the dense tensors due."""
    publishing = Publishing(dense_interval_s=1000)
    publishing.table.mark([3])
    publishing.to.error = RuntimeError("no")
    with pytest.raises(RuntimeError, match="no"):
        publishing.step(1)
    publishing.to.error = None
    assert publishing.to.pool.num_free == 2
    assert publishing.to.flusher.dense_step == -1
    flush = publishing.step(2)
    assert flush is not None and taken(flush) == [3]
    assert publishing.sent(flush) and is_exact(flush)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_reject_names_the_tensor(bad: float) -> None:
    """Under `reject`, NaN and Inf in a dense tensor stop the whole flush, and its rows stay dirty."""
    publishing = Publishing(non_finite="reject", model=nn.BatchNorm1d(3))
    publishing.table.mark([1])
    publishing.model.running_var[1] = bad
    with pytest.raises(NonFiniteError, match=r"dense tensor 'running_var': it has NaN or Inf; nothing of this flush"):
        publishing.step(1)
    assert not publishing.to.flushes
    assert publishing.to.flusher.num_dirty_rows == 1
    publishing.model.running_var[1] = 1
    assert is_exact(publishing.step(2))


def test_a_tensor_of_another_shape_is_an_error() -> None:
    """A parameter that was replaced by one of another shape stops the flush, and its rows stay dirty."""
    publishing = Publishing()
    publishing.table.mark([1])
    publishing.model.bias = nn.Parameter(torch.zeros(5))
    with pytest.raises(
        UnsupportedModelError, match=r"'bias' was float32\[2\] when it was attached and is float32\[5\]"
    ):
        publishing.step(1)
    assert publishing.to.flusher.num_dirty_rows == 1
    assert not publishing.to.flushes


def test_a_new_store_gets_them_at_once() -> None:
    """When all rows are marked for a new store, the dense tensors are due too."""
    publishing = Publishing(dense_interval_s=1000)
    publishing.step(1)
    publishing.to.release()
    assert not publishing.sent(publishing.step(2))
    publishing.to.release()
    publishing.to.flusher.mark_all(num_losses=1)
    flush = publishing.step(3)
    assert publishing.sent(flush) and is_exact(flush)


def test_a_name_is_streamed_once() -> None:
    """Tensors and tables of two models may not share a name, and a row has to fit into a frame."""
    publishing = Publishing()
    with pytest.raises(UnsupportedModelError, match="dense tensor 'weight' of another model is streamed already"):
        publishing.to.flusher.check_dense(publishing.tensors, max_frame_bytes=2**26)
    with pytest.raises(UnsupportedModelError, match="table 'weight' of another model is streamed already"):
        publishing.to.flusher.check_tables([Trained("weight").tapped], max_frame_bytes=2**26)
    with pytest.raises(ConfigError, match="one row of dense tensor 'turned' has 4104 bytes"):
        publishing.to.flusher.check_dense(tensors_of(DenseModel()), max_frame_bytes=4096)


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
