"""A few rows that are looked at tell of writes to the whole table, and are taken for nothing else."""

from __future__ import annotations

import torch

from headrace.streamer.taps.row_probe import RowProbe


def test_a_write_to_the_whole_table_is_seen() -> None:
    """Before rows were aimed at, some from all over the table are looked at; nothing is off until one changes."""
    for num_rows in (1, 7, 8, 9, 1000):
        weights = torch.arange(num_rows * 2.0).reshape(num_rows, 2)
        probe = RowProbe()
        assert not probe.is_off(weights)
        probe.keep(weights)
        assert not probe.is_off(weights)
        weights.data.mul_(0.5)
        assert probe.is_off(weights) == (num_rows > 0)
        probe.keep(weights)
        assert not probe.is_off(weights)


def test_rows_that_were_aimed_at_are_looked_at() -> None:
    """Of many rows some are looked at, of few all, and of none those before them."""
    weights = torch.zeros(1000, 2)
    probe = RowProbe()
    probe.keep(weights)
    for few in ([998], [5, 5, 17], list(range(100, 108))):
        probe.aim(torch.tensor(few))
        probe.aim(torch.tensor([], dtype=torch.int64))
        probe.keep(weights)
        for row in few:
            weights[row] += 1
            assert probe.is_off(weights)
            probe.keep(weights)
    probe.aim(torch.arange(500, 900))
    probe.keep(weights)
    weights[:500] += 1
    assert not probe.is_off(weights)
    weights[500:900] += 1
    assert probe.is_off(weights)


def test_bits_are_compared() -> None:
    """NaN is as it was, and a zero that has changed its sign is not."""
    weights = torch.tensor([[float("nan")], [0.0]])
    probe = RowProbe()
    probe.keep(weights)
    assert not probe.is_off(weights)
    weights[1] = -0.0
    assert probe.is_off(weights)


def test_columns_that_lie_apart_and_half_precision() -> None:
    """Rows are read of any layout and element type."""
    for weights in (torch.zeros(3, 30).T, torch.zeros(30, 6)[:, 1:4], torch.zeros(30, 3, dtype=torch.bfloat16)):
        probe = RowProbe()
        probe.keep(weights)
        probe.aim(torch.tensor([17]))
        probe.keep(weights)
        assert not probe.is_off(weights)
        weights[17, 2] = 1
        assert probe.is_off(weights)


def test_a_table_of_another_size() -> None:
    """Rows that a table does not have any more are not looked at; an empty table is never off."""
    probe = RowProbe()
    probe.keep(torch.zeros(50, 2))
    probe.aim(torch.tensor([49]))
    for num_rows in (3, 0):
        weights = torch.zeros(num_rows, 2)
        probe.keep(weights)
        assert not probe.is_off(weights)
    weights = torch.zeros(4, 2)
    probe.keep(weights)
    weights[3] = 1
    assert probe.is_off(weights)
