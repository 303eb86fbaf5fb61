"""Copies of rows in groups of ranks: when they should be equal, on one rank whose `sync` does nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from headrace.streamer.taps.synced_copies import SyncedCopies, SyncedTables
from headrace.streamer.taps.tapped_table import TablePart

pytestmark = pytest.mark.torchrec

ops = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")


class _Collection(nn.Module):
    """Has what is used of a `DMPCollection`."""

    is_away = False

    def sync(self) -> None:
        if self.is_away:
            raise RuntimeError("a rank is away")


def _make() -> Any:
    place = (common.EmbeddingLocation.HOST, ops.ComputeDevice.CPU)
    return ops.SplitTableBatchedEmbeddingBagsCodegen([(10, 4, *place)] * 2, learning_rate=0.1)


def _look_up(module: Any) -> torch.Tensor:
    ids = torch.tensor([1, 2])
    output: torch.Tensor = module(ids, torch.tensor([0, 1, 2]))
    return output


def test_copies_should_be_equal_from_a_sync_to_the_next_update() -> None:
    """Neither before the first sync, nor from an update on; a lookup alone changes nothing, of any module."""
    collection, module, other = _Collection(), _make(), _make()
    part = TablePart(fqn="rows", num_rows=20, dim=4, row_offset=10)
    tables = [
        SyncedTables(module=each, parts=parts, ranks=(0, 2), synced_by=collection)
        for each, parts in ((module, (None, part)), (other, (TablePart(fqn="other", num_rows=10, dim=4), None)))
    ]
    copies = SyncedCopies(tables)

    def names() -> list[str]:
        return [copy.fqn for copy in copies.copies()]

    assert names() == []
    collection.sync()
    assert names() == ["rows", "other"]
    copy = copies.copies()[0]
    assert (copy.ranks, copy.runs, copy.column) == ((0, 2), ((10, 10),), 0)
    assert torch.equal(copy.tensors()[0], module.split_embedding_weights()[1])
    output = _look_up(module)
    assert names() == ["rows", "other"]
    output.sum().backward()
    assert names() == ["other"]
    collection.is_away = True
    with pytest.raises(RuntimeError, match="a rank is away"):
        collection.sync()  # which may have written some tables: an audit compares them
    assert names() == ["rows", "other"]
    copies.close()
    assert "sync" not in vars(collection)
