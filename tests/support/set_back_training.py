"""A table whose steps train the rows that they are told, and a server that is set back to an older copy of itself."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["ROWS", "Trainer", "put_back"]

ROWS = 400


class Trainer:
    """A table that is trained, and can be put back.

    Attributes:
        fqn: The table's name.
    """

    def __init__(self, name: str = "t", num_rows: int = ROWS, *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.table = nn.Embedding(num_rows, 4, sparse=True)
        self.model = nn.ModuleDict({name: self.table})
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.1)
        self.fqn = f"{name}.weight"

    def step(self, first: int, end: int) -> None:
        """Train rows `first` to `end` - 1."""
        self.train(range(first, end))

    def train(self, ids: Iterable[int]) -> None:
        """Train some rows."""
        self.optimizer.zero_grad()
        self.table(torch.tensor(list(ids))).pow(2).sum().backward()
        self.optimizer.step()

    def save(self) -> dict[str, Any]:
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def put_back(older: Path, data: Path) -> None:
    """Put a copy of a server's directory in its place, as `cp -a` does; the server is stopped."""
    shutil.rmtree(data)
    shutil.copytree(older, data)
