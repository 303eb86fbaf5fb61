"""A small model in the training loops of other people's frameworks, also on ranks, and a look at what was streamed.

The frameworks are imported where they are used: one may be missing.
"""

from __future__ import annotations

import asyncio
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.schemas.row_records import PRESENT

NUM_ROWS, BATCH, NUM_EXAMPLES = 200, 8, 64


class Clicks(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Ids and labels, by the keys under which Transformers' trainer passes them to the model."""

    def __len__(self) -> int:
        return NUM_EXAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"ids": torch.tensor([index, 2 * index + 1]), "labels": torch.tensor(float(index % 2))}


class Tower(nn.Module):
    """A table under a linear layer; returns its loss as Transformers' trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.user = nn.Embedding(NUM_ROWS, 4)
        self.head = nn.Linear(4, 1)
        self.fails_at = -1  # number of a forward in training mode, which raises
        self.num_forwards = 0

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            if self.num_forwards == self.fails_at:
                raise RuntimeError("this batch is bad")
            self.num_forwards += 1
        logits = self.head(self.user(ids).sum(1))[:, 0]
        return {"loss": nn.functional.binary_cross_entropy_with_logits(logits, labels)}

    @property
    def rows(self) -> npt.NDArray[np.float32]:
        """A copy of the table, which outlives this process."""
        return self.user.weight.detach().numpy().copy()


def loader() -> torch.utils.data.DataLoader[dict[str, torch.Tensor]]:
    return torch.utils.data.DataLoader(Clicks(), batch_size=BATCH)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def trained_rows() -> npt.NDArray[np.int64]:
    """Return the ids of the rows that the loader's batches look up."""
    return np.unique([Clicks()[index]["ids"].numpy() for index in range(NUM_EXAMPLES)])


def stored_rows(address: str, name: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return the ids of a table's rows that the store has, int64[n], and their weights, float32[n, dim]."""

    async def read() -> Any:
        async with await EmbeddingReader.connect(address) as reader:
            return await reader.get(name, np.arange(NUM_ROWS))

    rows = asyncio.run(read())
    (ids,) = np.nonzero(rows.presence == PRESENT)
    return ids, rows.weights[ids]


def assert_stored(address: str, name: str, weights: npt.NDArray[np.float32]) -> None:
    """Assert that the store has every row of a table, as given."""
    ids, stored = stored_rows(address, name)
    assert len(ids) == len(weights)
    assert np.array_equal(stored, weights)


def num_rows_written(address: str) -> int:
    """Return how many rows all shards have taken since the server's start."""

    async def ask() -> int:
        async with await EmbeddingReader.connect(address) as reader:
            return sum(shard.num_rows_written for shard in await reader.status())

    return asyncio.run(ask())


def lightning_module(tower: Tower) -> Any:
    """Return a LightningModule of the tower."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.tower = tower

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.tower(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self)

    return Module()


def lightning_trainer(folder: Path, callbacks: list[Any], **settings: Any) -> Any:
    """Return a silent trainer on the CPU."""
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return lightning.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"devices": 1, "enable_checkpointing": False, "max_epochs": 2, **settings},
    )


def fit_on_rank(rank: int, address: str, folder: str) -> tuple[npt.NDArray[np.float32], list[dict[str, Any]]]:
    """Fit with DDP; return the table, and the streamer's states in the checkpoint."""
    from headrace.integrations.lightning import StreamingCallback

    warnings.simplefilter("ignore")
    tower = Tower()
    callback = StreamingCallback(address, run="ranks", model="lightning-ranks")
    settings: dict[str, Any] = {"devices": dist.get_world_size(), "strategy": "ddp"}
    trainer = lightning_trainer(Path(folder), [callback], **settings)
    trainer.fit(lightning_module(tower), loader())
    path = Path(folder) / "ranks.ckpt"
    trainer.save_checkpoint(path)
    return tower.rows, torch.load(path, weights_only=False)["callbacks"]["StreamingCallback"]["ranks"]


def accelerate_on_rank(rank: int, address: str, folder: str) -> tuple[npt.NDArray[np.float32], list[dict[str, Any]]]:
    """Train by Accelerate with DDP; return the table, and the streamer's states in the checkpoint."""
    from accelerate import Accelerator

    from headrace.integrations.training_loop import LoopStreaming

    warnings.simplefilter("ignore")
    tower = Tower()
    accelerator = Accelerator(cpu=True)
    model, optimizer, batches = accelerator.prepare(tower, optimizer_of(tower), loader())
    streaming = LoopStreaming(address, run="ranks", model="accelerate-ranks")
    accelerator.register_for_checkpointing(streaming)
    with streaming.attached(model, optimizer):
        train_by_accelerate(accelerator, model, optimizer, batches)
        accelerator.save_state(folder)
    return tower.rows, torch.load(Path(folder) / "custom_checkpoint_0.pkl")["ranks"]


def train_by_accelerate(accelerator: Any, model: nn.Module, optimizer: Any, batches: Any) -> None:
    for batch in batches:
        optimizer.zero_grad()
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()


def transformers_trainer(tower: Tower, folder: Path, **settings: Any) -> Any:
    """Return a silent trainer on the CPU."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
        **{"num_train_epochs": 2, "save_strategy": "no", **settings},
    )
    optimizer = optimizer_of(tower)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    return Trainer(
        model=tower, args=arguments, train_dataset=Clicks(), eval_dataset=Clicks(), optimizers=(optimizer, schedule)
    )


def trainer_on_rank(rank: int, address: str, folder: str) -> tuple[npt.NDArray[np.float32], list[dict[str, Any]]]:
    """Train by Transformers with DDP; return the table, and the streamer's states in the checkpoint."""
    import json

    from headrace.integrations.transformers import streaming

    warnings.simplefilter("ignore")
    tower = Tower()
    trainer = transformers_trainer(tower, Path(folder), ddp_backend="gloo", save_strategy="epoch")
    with streaming(trainer, address, run="ranks", model="transformers-ranks"):
        trainer.train()
    dist.barrier()
    step = trainer.state.global_step
    saved = json.loads((Path(folder) / f"checkpoint-{step}" / "trainer_state.json").read_text())
    return tower.rows, saved["stateful_callbacks"]["headrace"]["state"]["ranks"]
