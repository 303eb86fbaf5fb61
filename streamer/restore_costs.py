"""Measure what reading and sending rows costs: each rank of a restore reads a few megabytes of the largest table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from headrace.paramserver.reading.reader import Rows
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import TableSpec
from headrace.streamer.read_plan import PIECE_BYTES, ReadCosts, RowBox, RowRead
from headrace.streamer.row_reads import Read, decode_box, encode_box, rows_in_box
from headrace.streamer.world import World, together

__all__ = ["MAX_SAMPLE_BYTES", "measure_costs"]

MAX_SAMPLE_BYTES = 2 * PIECE_BYTES
"""A larger sample tells no more."""


def measure_costs(
    world: World,
    read: Read,
    boxes: Sequence[Sequence[RowBox]],
    specs: Mapping[str, TableSpec],
    *,
    hosts: Sequence[str],
    sample_bytes: int = MAX_SAMPLE_BYTES,
) -> ReadCosts:
    """Read some rows on rank 0 alone, then on all ranks, and send them around; all ranks call it together.

    Ranks of a host count as equally fast, as the median of them: their differences are chance.

    Args:
        world: The ranks.
        read: Reads from the source.
        boxes: What each rank holds; there is a row among them.
        specs: The tables, by name, with those states that are read.
        hosts: Each rank's.
        sample_bytes: About what each rank reads; rank 0 twice.

    Raises:
        HeadraceError: The source, or another rank, has failed.
    """
    on_all = partial(together, world, cannot="could not measure what a restore costs")
    ends: dict[str, int] = {}
    for box in (box for of_rank in boxes for box in of_rank):
        ends[box.name] = max(ends.get(box.name, 0), box.end_row)
    widths = {name: RecordLayout(specs[name], specs[name].whole).size_bytes for name in ends}
    name = max(sorted(ends), key=lambda name: ends[name] * widths[name])
    num_rows = min(ends[name], max(1, sample_bytes // widths[name]))
    largest: list[tuple[RowRead, Rows]] = []

    def read_slot(slot: int) -> tuple[float, float, float]:
        first_row = (ends[name] - num_rows) * slot // world.size
        rows = RowRead(name=name, first_row=first_row, end_row=first_row + num_rows, row_bytes=widths[name], holders=())
        one = next(iter(rows.pieces(1)))
        pieces = [one, one, *rows.pieces()]
        times = [time.perf_counter()]

        def take(read: RowRead, rows: Rows) -> None:
            times.append(time.perf_counter())
            if not largest or read.num_rows > largest[0][0].num_rows:
                largest[:] = [(read, rows)]

        read(pieces, take)
        request_s = times[2] - times[1]
        bytes_s = max(times[-1] - times[2] - request_s * (len(pieces) - 2), 0.0)
        return times[1] - times[0], request_s, bytes_s / rows.size_bytes

    # Each time other rows: those that were read are in memory then.
    *_, alone = on_all(lambda: read_slot(world.size) if world.rank == 0 else (0.0, 0.0, 0.0))[0]
    starts, requests, timed = zip(*on_all(lambda: read_slot(world.rank)), strict=True)

    def median(values: Sequence[float], host: str) -> float:
        return statistics.median(value for value, each in zip(values, hosts, strict=True) if each == host)

    links = []
    for is_same_host in (True, False):
        receivers = [
            [rank for rank, other in enumerate(hosts) if rank != sender and (other == host) == is_same_host]
            for sender, host in enumerate(hosts)
        ]
        sent = world.gather(_send(world, *largest[0], specs[name], receivers))
        links.append({host: median(sent, host) for host in hosts})
    faster = min(1.0, alone / timed[0]) if timed[0] else 1.0
    reads = [median(timed, host) for host in hosts]
    return ReadCosts(
        start_s=max(starts),
        request_s=tuple(median(requests, host) for host in hosts),
        read=tuple(faster * each for each in reads),
        store=1 / sum(1 / each for each in reads) if all(reads) else 0.0,
        send=tuple(
            tuple(links[0][one] if one == other else max(links[1][one], links[1][other]) for other in hosts)
            for one in hosts
        ),
    )


def _send(world: World, read: RowRead, rows: Rows, spec: TableSpec, receivers: Sequence[Sequence[int]]) -> float:
    """Send rows from each rank to its receivers, by rank, a share to each; return seconds a byte of this rank's."""

    def share_of(sender: int) -> RowBox:
        num_rows = max(1, read.num_rows // max(1, len(receivers[sender])))
        return RowBox(name=read.name, first_row=read.first_row, end_row=read.first_row + num_rows, columns=spec.whole)

    def size_of(box: RowBox) -> int:
        return (box.end_row - box.first_row) * read.row_bytes

    senders = [sender for sender in range(world.size) if world.rank in receivers[sender]]
    received = [size_of(share_of(sender)) if sender in senders else 0 for sender in range(world.size)]
    world.exchange([0])
    began_s = time.perf_counter()
    sent = [torch.empty(0, dtype=torch.uint8)] * world.size
    for rank in receivers[world.rank]:
        box = share_of(world.rank)
        sent[rank] = torch.from_numpy(encode_box(rows_in_box(rows, spec, box), spec, box).view(np.uint8))
    for sender, data in enumerate(world.swap(sent, received)):
        if sender in senders:
            decode_box(data.numpy(), spec, share_of(sender))
    num_bytes = sum(received) + sum(each.numel() for each in sent)
    return (time.perf_counter() - began_s) / max(1, num_bytes)
