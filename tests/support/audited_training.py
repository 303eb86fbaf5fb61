"""A rank of a run whose tables are replicated, which audits itself; importable, so that ranks can run it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headrace.streamer import RawEmbeddingStreamer


def audit_on_rank(rank: int, address: str) -> tuple[list[tuple[int, int, int]], bool, list[int]]:
    """Return (rank, first row, rows compared) of each part, whether all are equal, and rows that one rank spoiled."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(1001, 4)))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with RawEmbeddingStreamer(address, run="ranks") as streamer:
        streamer.attach(model, optimizer, publish="updated")
        for step in range(3):
            optimizer.zero_grad()
            ids = torch.arange(step, 1001, 7) + rank
            torch.autograd.backward(model(ids.clamp(max=1000)).sum())
            optimizer.step()
        report = streamer.audit()
        if rank == 1:
            # Rows that the last step has not trained, since the tap looks at some of those.
            model.module[0].weight.detach().numpy()[1::7, 0] += 1
        spoiled = streamer.audit()
        parts = [(table.rank, table.row_offset, table.num_rows) for table in report.tables]
        return parts, report.is_equal, sorted({r for t in spoiled.tables for r in t.differing_row_ids})
