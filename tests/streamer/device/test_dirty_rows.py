"""Changed rows on a device: the same set as on the host, and only queued work where a step goes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from fake_device import FakeDevice
from hypothesis import given, settings

from headrace.kernels.dirty_bitmap import make_bitmap, mark_dirty_tables_reference
from headrace.kernels.dirty_sets import DirtyRows
from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer.device.dirty_rows import DeviceBitmap, DeviceDirtyRows, slots_of
from headrace.streamer.device.runtime import CudaRuntime, cuda_runtime

IDS = st.lists(st.integers(0, 99), max_size=8)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["mark", "discard", "contains", "add host", "add device"]), IDS),
        st.tuples(st.just("take"), st.tuples(st.integers(0, 9), st.integers(0, 99))),
        st.tuples(st.sampled_from(["mark_all", "clear", "grow", "count"]), st.none()),
    ),
    max_size=12,
)


@settings(max_examples=60)
@given(operations=OPERATIONS, seed=st.integers(0, 2**32))
def test_it_is_the_set_that_is_kept_on_the_host(operations: list[tuple[str, object]], seed: int) -> None:
    """Whatever runs when, it answers as `DirtyRows` does, beside other tables that stay as they are."""
    fake = FakeDevice(seed)
    bitmap = DeviceBitmap(fake, 64 + slots_of(100))
    before, rows, expected = DeviceDirtyRows(64, bitmap), DeviceDirtyRows(100, bitmap, 64), DirtyRows(100)
    before.mark(torch.tensor([0, 63]))
    for name, argument in operations:
        ids = torch.tensor(argument if isinstance(argument, list) else [], dtype=torch.int64)
        if name.startswith("add"):
            other = DirtyRows(100)
            other.mark(ids)
            beside = DeviceDirtyRows.beside(rows)
            beside.mark(ids)
            rows.add(beside if name == "add device" else other)
            expected.add(other)
        elif name == "take":
            assert isinstance(argument, tuple)
            taken = [each.take(argument[0], first_row=argument[1]).tolist() for each in (rows, expected)]
            assert taken[0] == taken[1]
        elif name == "grow":
            bitmap.grow(64)
        elif name == "count":
            assert (rows.count, rows.is_empty) == (expected.count, expected.is_empty)
        elif name == "contains":
            assert rows.contains(ids).tolist() == expected.contains(ids).tolist()
        elif name in ("mark_all", "clear"):
            for each in (rows, expected):
                getattr(each, name)()
        else:
            for each in (rows, expected):
                getattr(each, name)(ids)
    assert rows.to_host().take().tolist() == expected.take().tolist()
    assert rows.is_empty
    assert before.take().tolist() == [0, 63]


@settings(max_examples=60)
@given(
    tables=st.lists(st.tuples(st.integers(1, 130), st.lists(st.integers(-1, 129), max_size=8)), max_size=20),
    seed=st.integers(0, 2**32),
)
def test_tables_that_are_marked_together(tables: list[tuple[int, list[int]]], seed: int) -> None:
    """The same rows are marked as table by table, by work that is queued once and read by nobody before it runs."""
    fake = FakeDevice(seed)
    slots = [0, *itertools.accumulate(slots_of(num_rows) for num_rows, _ in tables)]
    together, apart = (DeviceBitmap(fake, slots[-1]) for _ in range(2))
    marks = []
    for (num_rows, ids), slot in zip(tables, slots, strict=False):
        dtype = torch.int32 if num_rows % 5 == 0 else torch.int64
        marks.append(
            (DeviceDirtyRows(num_rows, together, slot), torch.tensor(ids, dtype=dtype).clamp(max=num_rows - 1))
        )
        DeviceDirtyRows(num_rows, apart, slot).mark(marks[-1][1])
    with fake.training(), mock.patch.object(fake, "enqueue", wraps=fake.enqueue) as enqueue:
        together.mark_tables(marks)
    assert enqueue.call_count == 1
    assert together.is_marked and not together.is_captured
    assert fake.read(together.bits).tolist() == fake.read(apart.bits).tolist()
    fake.capturing = True
    together.mark_tables(marks)
    assert together.is_captured


def test_a_row_beyond_its_table_stops_the_device() -> None:
    """An id that lies in another table's slots is no mark there: the next wait raises."""
    fake = FakeDevice()
    bitmap = DeviceBitmap(fake, 128)
    bitmap.mark_tables([(DeviceDirtyRows(10, bitmap), torch.tensor([64]))])
    with pytest.raises(RuntimeError, match="row 64 is not below 10"):
        fake.read(bitmap.bits)


def test_marking_only_queues_work() -> None:
    """Nothing of what a step does asks the device for anything."""
    fake = FakeDevice()
    rows = DeviceDirtyRows(100, DeviceBitmap(fake, slots_of(100)))
    other, ids = DeviceDirtyRows.beside(rows), torch.tensor([[1, 2], [-1, 2]], dtype=torch.int32)
    with fake.training():
        other.mark(ids)
        rows.add(other)
        rows.clear()
        rows.mark_all()
        rows.clear()
        rows.mark(ids)
    assert fake.num_waits == 0
    assert rows.take().tolist() == [1, 2]


def test_what_is_known_without_waiting() -> None:
    """After a mark rows may be dirty, after a drain none is; after a captured mark some may always be."""
    fake = FakeDevice()
    bitmap = DeviceBitmap(fake, slots_of(100))
    rows = DeviceDirtyRows(100, bitmap)
    assert not bitmap.is_marked
    rows.mark(torch.tensor([1]))
    assert bitmap.is_marked
    bitmap.note_drain()
    assert not bitmap.is_marked
    fake.capturing = True
    rows.mark(torch.tensor([1]))
    bitmap.note_drain()
    assert bitmap.is_marked


def test_what_a_graph_marks_stays_on_the_device() -> None:
    """A set cannot move to the host once a graph marks it: what a replay marks later would be lost in silence."""
    fake = FakeDevice()
    rows = DeviceDirtyRows(100, DeviceBitmap(fake, slots_of(100)))
    fake.capturing = True
    rows.mark(torch.tensor([1]))
    fake.capturing = False
    with pytest.raises(UnsupportedModelError, match="captured in a CUDA graph: set device_pipeline=False"):
        rows.to_host()
    assert rows.take().tolist() == [1]


class _FakeWithGraph(FakeDevice):
    """Keeps what is queued during a capture, and queues it at each replay."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._captured: list[Callable[[], object]] = []

    def enqueue(self, work: Callable[[], object]) -> None:
        if self.capturing:
            self._captured.append(work)
        else:
            super().enqueue(work)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor  # it is there: a graph reads its memory at each replay

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        self.capturing = True
        yield
        self.capturing = False

    def replay(self) -> None:
        for work in self._captured:
            self.enqueue(work)


class _CudaWithGraph(CudaRuntime):
    """Captures a CUDA graph, in the mode in which torch does, and replays it."""

    def __init__(self) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        assert isinstance(made := cuda_runtime(device), CudaRuntime), made
        super().__init__(device)
        self._graph = torch.cuda.CUDAGraph()

    def capture(self) -> contextlib.AbstractContextManager[None]:
        return torch.cuda.graph(self._graph)

    def replay(self) -> None:
        self._graph.replay()


@pytest.mark.parametrize(
    "make_runtime",
    [
        pytest.param(_CudaWithGraph, id="on a GPU", marks=pytest.mark.gpu),
        *[pytest.param(lambda seed=seed: _FakeWithGraph(seed), id=f"on a fake device {seed}") for seed in range(5)],
    ],
)
def test_a_captured_mark_marks_at_each_replay(make_runtime: Callable[[], _FakeWithGraph | _CudaWithGraph]) -> None:
    """A graph marks what its input holds by then, and a thread that waits and copies does not break the capture."""
    runtime = make_runtime()
    generator = torch.Generator().manual_seed(1)
    num_rows = [1 + 37 * table for table in range(18)]  # two launches
    slots = [0, *itertools.accumulate(map(slots_of, num_rows))]
    dtypes = [torch.int32 if table % 5 == 0 else torch.int64 for table in range(18)]  # int32 is copied first

    def draw() -> list[torch.Tensor]:
        return [
            torch.randint(-1, rows, (40,), generator=generator, dtype=dtype)
            for rows, dtype in zip(num_rows, dtypes, strict=True)
        ]

    bitmap, inputs = DeviceBitmap(runtime, slots[-1]), [ids.to(runtime.device) for ids in draw()]
    tables = [DeviceDirtyRows(rows, bitmap, slot) for rows, slot in zip(num_rows, slots, strict=False)]
    marks = list(zip(tables, inputs, strict=True))
    bitmap.mark_tables(marks)  # the kernels are loaded by the first step
    assert bool(runtime.read(bitmap.bits).any()) and not bitmap.is_captured
    runtime.enqueue(bitmap.bits.zero_)
    source, target = torch.arange(200, dtype=torch.uint8, device=runtime.device), runtime.pinned(200)
    runtime.record().synchronize()
    with ThreadPoolExecutor(1) as sender, runtime.capture():
        bitmap.mark_tables(marks)
        sender.submit(lambda: runtime.copy_aside(source, target).synchronize()).result()
    assert target.tolist() == list(range(200))
    assert bitmap.is_captured
    assert not runtime.read(bitmap.bits).any()  # nothing runs in a capture
    expected = make_bitmap(slots[-1])
    for _ in range(2):
        for ids, drawn in zip(inputs, (new := draw()), strict=True):
            runtime.enqueue(lambda ids=ids, drawn=drawn: ids.copy_(drawn))
        runtime.replay()
        mark_dirty_tables_reference(expected, new, slots[:-1], num_rows)
        assert runtime.read(bitmap.bits).tolist() == expected.tolist()
