"""Changed rows on a device: the same set as on the host, and only queued work where a step goes."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from fake_device import FakeDevice
from hypothesis import given, settings

from headrace.kernels.dirty_rows import DirtyRows
from headrace.streamer.device.device_dirty_rows import DeviceBitmap, DeviceDirtyRows, slots_of

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
    """After a mark rows may be dirty, after a cut none is; after a captured mark some may always be."""
    fake = FakeDevice()
    bitmap = DeviceBitmap(fake, slots_of(100))
    rows = DeviceDirtyRows(100, bitmap)
    assert not bitmap.is_marked
    rows.mark(torch.tensor([1]))
    assert bitmap.is_marked
    bitmap.note_cut()
    assert not bitmap.is_marked
    fake.capturing = True
    rows.mark(torch.tensor([1]))
    bitmap.note_cut()
    assert bitmap.is_marked
