"""Frequencies over passes: against a dict, and after damage to the file."""

from __future__ import annotations

import os
import stat
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.paramserver.expiry.frequency import FrequencyFile, version_stamps
from headrace.schemas.errors import StorageError

_Versions = dict[int, int]


def _pass(
    path: Path, versions: _Versions, *, piece: int = 3, is_saved: bool = True, fingerprint: int = 7
) -> dict[int, float]:
    """Do a pass over rows of epoch 1, given their steps; return their frequencies."""
    found: dict[int, float] = {}
    ids = np.array(sorted(versions), np.int64)
    with FrequencyFile(path, fingerprint, decay=0.5, is_written=True) as file:
        for start in range(0, ids.size, piece):
            some = ids[start : start + piece]
            epochs, steps = np.ones_like(some), np.array([versions[row] for row in some.tolist()], np.int64)
            frequencies = file.frequencies_of(some, epochs, steps)
            file.keep(some, epochs, steps, frequencies)
            found |= dict(zip(some.tolist(), frequencies.tolist(), strict=True))
        if is_saved:
            file.save()
    return found


@given(runs=st.lists(st.dictionaries(st.integers(0, 30), st.integers(0, 3)), max_size=6), piece=st.integers(1, 9))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_counts_as_a_dict_would(tmp_path: Path, runs: list[_Versions], piece: int) -> None:
    """A row starts at 1, decays at each pass and gains 1 when it changed; expired rows are forgotten."""
    path = tmp_path / "1.frequencies"
    path.unlink(missing_ok=True)
    known: dict[int, tuple[int, float]] = {}
    for versions in runs:
        found = _pass(path, versions, piece=piece)
        known = {
            row: (step, 1.0 if row not in known else known[row][1] * 0.5 + (known[row][0] != step))
            for row, step in versions.items()
        }
        assert found == pytest.approx({row: frequency for row, (_, frequency) in known.items()})


def test_a_table_that_has_grown_keeps_its_frequencies(tmp_path: Path) -> None:
    """A file of an earlier fingerprint counts, one of another table does not."""
    path = tmp_path / "1.frequencies"
    _pass(path, {1: 1}, fingerprint=7)
    ids, ones = np.array([1]), np.ones(1, np.int64)
    for earlier, frequency in (([5, 7], 1.5), ([5], 1.0)):
        with FrequencyFile(path, 9, decay=0.5, is_written=False, earlier=earlier) as file:
            assert file.frequencies_of(ids, ones, 2 * ones).tolist() == [frequency]


def test_an_interrupted_run_counts_nothing(tmp_path: Path) -> None:
    """Without `save` the old frequencies stay, and no other file is left."""
    path = tmp_path / "1.frequencies"
    _pass(path, {1: 1, 2: 1})
    assert _pass(path, {1: 2, 2: 1}, is_saved=False) == {1: 1.5, 2: 0.5}
    assert _pass(path, {1: 2, 2: 1}) == {1: 1.5, 2: 0.5}
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    one = np.ones(1, np.int64)  # a file that is only read is not created
    with FrequencyFile(tmp_path / "no" / "1.frequencies", 7, decay=0.5, is_written=False) as file:
        file.keep(one, one, one, file.frequencies_of(one, one, one))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_damaged_file_begins_anew(tmp_path: Path) -> None:
    """Rows after a cut or a flipped byte, or of another table, count as new, and the pass goes on."""
    path = tmp_path / "1.frequencies"
    versions = {row: 1 for row in range(4)}  # on two pages
    _pass(path, versions)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at])
        assert set(_pass(path, versions).values()) <= {0.5, 1.0}
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        assert set(_pass(path, versions).values()) <= {0.5, 1.0}
    path.write_bytes(whole)
    assert set(_pass(path, versions, fingerprint=8).values()) == {1.0}


def test_a_damaged_size_takes_no_memory(tmp_path: Path) -> None:
    """A page that claims more rows than any has is not read."""
    path = tmp_path / "1.frequencies"
    _pass(path, {1: 1})
    data = bytearray(path.read_bytes())
    data[19] = 0x10  # of the first page's size, 2²⁸ rows more
    path.write_bytes(data)
    tracemalloc.start()
    try:
        assert _pass(path, {1: 1}) == {1: 1.0}
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_golden_bytes(tmp_path: Path) -> None:
    """The file is as the documentation shows it."""
    path = tmp_path / "1.frequencies"
    _pass(path, {258: 5})
    assert path.read_bytes().hex() == (
        "48524652455130310700000000000000"  # HRFREQ01, fingerprint of the table
        "01000000ea4629c3"  # a page of one row, crc32
        "0201000000000000bf7d83230000803f"  # row 258, stamp of (1, 5), frequency 1.0
        "0000000000000000"  # an empty page: the end
    )


def test_stamps_differ() -> None:
    """Neighboring versions have different stamps, also when epoch and step are swapped."""
    epochs, steps = np.meshgrid(np.arange(1, 101), np.arange(1000))
    assert np.unique(version_stamps(epochs.ravel(), steps.ravel())).size > 99_990


def test_a_run_is_complete_once_its_file_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new file is synced before it is renamed, and its directory after."""
    path = tmp_path / "1.frequencies"
    synced: list[tuple[bool, int, bool]] = []

    def sync(fd: int) -> None:
        status = os.fstat(fd)
        synced.append((stat.S_ISDIR(status.st_mode), status.st_size, path.exists()))

    monkeypatch.setattr(os, "fsync", sync)
    _pass(path, {258: 5})
    (is_folder, size_bytes, is_there), (is_folder_last, _, is_there_last) = synced
    assert (is_folder, size_bytes, is_there) == (False, path.stat().st_size, False)
    assert (is_folder_last, is_there_last) == (True, True)


@pytest.mark.parametrize("num_rows", [1, 4000])
def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, num_rows: int) -> None:
    """A full disk fails the pass with the reason, and no part of its file stays."""
    path = tmp_path / "1.frequencies"
    path.with_suffix(".new").symlink_to("/dev/full")
    with pytest.raises(StorageError, match="No space left"):
        _pass(path, dict.fromkeys(range(num_rows), 1), piece=1000)
    assert list(tmp_path.iterdir()) == []


def test_files_that_cannot_be_opened_leave_nothing_open(tmp_path: Path) -> None:
    """A disk that refuses is a storage error that names the file, and files opened before are closed."""
    path = tmp_path / "1.frequencies"
    _pass(path, {1: 1})
    open_files = os.listdir("/proc/self/fd")
    path.with_suffix(".new").mkdir()
    with pytest.raises(StorageError, match="directory"):
        FrequencyFile(path, 7, decay=0.5, is_written=True)
    assert os.listdir("/proc/self/fd") == open_files
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="frequencies"):
        FrequencyFile(tmp_path / "file" / "1.frequencies", 7, decay=0.5, is_written=True)
