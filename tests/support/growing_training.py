"""A TorchRec model that gets another sharded module while it trains, with all tables on rank 0."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["grow_on_rank"]


class Growing(nn.Module):
    """The sum of its modules of bags, each with one table."""

    def forward(self, inputs: Any) -> torch.Tensor:
        return torch.stack([module(inputs).values().pow(2).sum() for module in self.children()]).sum()


def grow_on_rank(rank: int, address: str) -> tuple[bool, str, list[str]]:
    """Attach again with a new module, and once more; return whether all is equal, the refusal, and tables here."""
    import torchrec

    from headrace.schemas.errors import UnsupportedModelError
    from headrace.streamer import RawEmbeddingStreamer

    model = Growing()
    inputs = torchrec.KeyedJaggedTensor(keys=["f"], values=torch.tensor([rank, 5]), lengths=torch.tensor([2]))
    with RawEmbeddingStreamer(address, run="growing", model="growing") as streamer:
        for name in ("first", "second"):
            model.add_module(name, _table_wise())
            streamer.attach(model)
            for _ in range(2):
                model(inputs).backward()
            streamer.step()
            streamer.flush()
        try:
            streamer.attach(model)
            refusal = ""
        except UnsupportedModelError as exc:
            refusal = str(exc)
        return streamer.audit().is_equal, refusal, sorted(table.path for table in streamer.tables)


def _table_wise() -> nn.Module:
    import torchrec
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import table_wise
    from torchrec_models import fuse, parallel, plan_of

    config = torchrec.EmbeddingBagConfig(name="t", num_embeddings=30, embedding_dim=8, feature_names=["f"])
    bags = torchrec.EmbeddingBagCollection(tables=[config], device=torch.device("cpu"))
    fuse("sgd", bags.parameters())
    sharder = EmbeddingBagCollectionSharder()
    sharded: nn.Module = parallel(bags, {"": plan_of(bags, {"t": table_wise(rank=0)}, sharder)}, sharder)
    return sharded
