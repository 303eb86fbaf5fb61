"""A training script to kill amid the first upload of its table: run it with an address and `kill` or `end`."""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from watched_server import wait_until

from headrace.streamer import RawEmbeddingStreamer

__all__ = ["NUM_ROWS", "main", "trained_weights"]

NUM_ROWS = 40_000


def _make() -> tuple[nn.Embedding, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Embedding(NUM_ROWS, 8)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _train(model: nn.Embedding, optimizer: torch.optim.Optimizer) -> None:
    for row in range(3):
        optimizer.zero_grad()
        model(torch.tensor([row])).sum().backward()
        optimizer.step()


def trained_weights() -> npt.NDArray[np.float32]:
    """Return the weights that the script ends with, however often it was killed before."""
    model, optimizer = _make()
    _train(model, optimizer)
    return model.weight.detach().numpy()


def main(address: str, *, waits_to_be_killed: bool) -> None:
    """Train; then wait to be killed once a part of the rows is acked, or send all and compare."""
    model, optimizer = _make()
    # Two buffers take a fifth of the rows.
    streamer = RawEmbeddingStreamer(address, run="ctr", model="ctr", staging_bytes=128 << 10)
    streamer.attach(model, optimizer)
    _train(model, optimizer)
    if waits_to_be_killed:
        wait_until(lambda: streamer.stats().num_rows_sent > 0, "a row that is acked")
        print("sent a part", flush=True)
        sys.stdin.read()
    report = streamer.audit(only_present=False)
    print("equal" if report.is_equal else report, flush=True)
    streamer.close()


if __name__ == "__main__":
    main(sys.argv[1], waits_to_be_killed=sys.argv[2] == "kill")
