"""Two-tower retrieval in plain PyTorch: trained on an interaction log, streamed, and served from a replica meanwhile.

Run it from a checkout; it takes a quarter of a minute:

    pip install '.[torch]'
    python examples/two_tower.py

It starts a server of two shards in a temporary directory, trains on the sample log of `headrace demo`, and after each
tenth of the log retrieves items for the users who come next with a model that reads from the replica. It prints how
often the right item is among the first hundred, how old the rows were when they became visible, and at the end whether
every row of trainer, server and replica is equal. `--server HOST:PORT` uses a running server.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from headrace import EmbeddingReplica, RawEmbeddingStreamer, ServerProcess, serve_model

LOG = Path(__file__).parents[1] / "scripts" / "ranking_demo" / "sample_interactions.csv.gz"
DIM, BATCH, NUM_OTHERS, NUM_PARTS, TOP = 32, 64, 256, 10, 100


class Tower(nn.Module):
    """One row for each id, and a dense layer on top of it."""

    def __init__(self, num_rows: int) -> None:
        """Make a table of `num_rows` rows."""
        super().__init__()
        self.table = nn.Embedding(num_rows, DIM, sparse=True)
        nn.init.normal_(self.table.weight, std=0.1)
        self.top = nn.Linear(DIM, DIM)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return float32[n, DIM] for int64[n]."""
        return self.top(self.table(ids))


class TwoTower(nn.Module):
    """Scores every given item for every given user."""

    def __init__(self, num_users: int, num_items: int) -> None:
        """Make both towers."""
        super().__init__()
        self.user, self.item = Tower(num_users), Tower(num_items)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return float32[n, m] for int64[n] users and int64[m] items."""
        return self.user(users) @ self.item(items).T


def read_log() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the users and the items of all events in the order of time, int64[n] each, numbered from 0."""
    events = np.loadtxt(LOG, np.int64, delimiter=",", skiprows=1)
    events = events[np.argsort(events[:, 0], kind="stable")]
    users, items = (np.unique(events[:, column], return_inverse=True)[1] for column in (1, 2))
    return torch.from_numpy(users), torch.from_numpy(items)


def hit_rate(served: nn.Module, users: torch.Tensor, items: torch.Tensor, num_items: int) -> float:
    """Return how often the item of an event is among the first TOP of all items, 0 to 1."""
    with torch.inference_mode():
        best = served(users, torch.arange(num_items)).topk(TOP).indices
    return (best == items[:, None]).any(1).float().mean().item()


def main() -> None:
    """Train, stream and serve."""
    parser = argparse.ArgumentParser(description="Two-tower retrieval, streamed while it trains.")
    parser.add_argument("--server", metavar="HOST:PORT", help="a running server; without it one is started")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a model this small gains nothing from a second one
    users, items = read_log()
    num_users, num_items = int(users.max()) + 1, int(items.max()) + 1
    model = TwoTower(num_users, num_items)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with ExitStack() as stack:
        address = arguments.server
        if address is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            address = stack.enter_context(ServerProcess.start(folder / "store", shards=2)).address
        # Rows go out after each step, and the two dense layers four times a second.
        settings = {"freshness_s": 0, "max_cost_percent": 100, "dense_interval_s": 0.25}
        streamer = stack.enter_context(RawEmbeddingStreamer(address, run="two-tower", **settings))
        streamer.attach(model, optimizer, publish="all", dense=True)
        streamer.flush()  # now a replica has a whole model to begin with
        replica = stack.enter_context(EmbeddingReplica(address))
        served = serve_model(TwoTower(num_users, num_items), replica)
        parts = zip(users.chunk(NUM_PARTS), items.chunk(NUM_PARTS), strict=True)
        for part, (now_users, now_items) in enumerate(parts, start=1):
            rate = hit_rate(served, now_users, now_items, num_items)  # before it is trained on
            for some_users, some_items in zip(now_users.split(BATCH), now_items.split(BATCH), strict=True):
                others = torch.randint(num_items, (NUM_OTHERS,))  # each event's item against the batch's and some more
                scores = model(some_users, torch.cat([some_items, others]))
                optimizer.zero_grad()
                cross_entropy(scores, torch.arange(len(some_users)), reduction="sum").backward()
                optimizer.step()  # the changed rows are on their way
            delay = replica.freshness()[0].delay
            print(
                f"part {part:2}: {rate:6.1%} of items among the first {TOP}; rows visible after "
                f"{delay.percentile(50) * 1e3:.0f} ms (p50), {delay.percentile(99) * 1e3:.0f} ms (p99)"
            )
        streamer.flush()
        replica.wait_for(streamer.stats().step, timeout_s=10)
        is_equal = streamer.audit().is_equal and replica.audit().is_equal
        print(f"{num_users + num_items} rows of trainer, server and replica are {'' if is_equal else 'not '}equal")


if __name__ == "__main__":
    main()
