"""The page's Ray Serve deployment in Ray itself: what it answers over HTTP is what the trainer's model computes."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from documented_blocks import blocks_of
from held_ports import hold_ports
from replica_endpoint import replica_endpoint

from headrace.paramserver.shard.launch import ServerProcess
from headrace.streamer import RawEmbeddingStreamer

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's

ROOT = Path(__file__).resolve().parent.parent
_IDS = [[3, 5, 8], [1, 1, 2]]
_WAIT_S = 60.0
_RANKER = """\
import torch
from torch import nn


class Ranker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.EmbeddingBag(60, 4, sparse=True)
        self.top = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.user(ids))[:, 0]
"""


@pytest.fixture
def in_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Start Ray with a Serve proxy; return its port. Its processes import what this one does, and from `tmp_path`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    paths = os.pathsep.join([str(tmp_path), str(ROOT), *sys.path])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "HEADRACE_STREAMER_MODEL": "default"}},
    )
    try:
        port = hold_ports()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield port
    finally:
        serve.shutdown()
        ray.shutdown()
        gc.collect()  # here, where the warning of processes that Ray has left to themselves is not an error
        for name in ("ranker", "ranker_app"):
            sys.modules.pop(name, None)


def _answer(port: int) -> Any:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/", json.dumps(_IDS).encode())
    with urllib.request.urlopen(request, timeout=_WAIT_S) as reply:
        return json.load(reply)


@pytest.mark.timeout(300)
def test_a_deployment_answers_what_the_trainer_computes(server: ServerProcess, tmp_path: Path, in_ray: int) -> None:
    """Processes of the page score with one copy of the trainer's rows and dense part, and with new ones."""
    (block,) = [b for b in blocks_of((ROOT / "docs/replicas.md").read_text()) if b.title == "ranker_app.py"]
    (tmp_path / "ranker.py").write_text(_RANKER)
    from ranker import Ranker  # type: ignore[import-not-found]

    torch.manual_seed(0)
    model = Ranker()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with RawEmbeddingStreamer(server.address, run="ray") as streamer:
        streamer.attach(model, optimizer, publish="all", dense=True)
        streamer.flush()
        with replica_endpoint(tmp_path, server.address, "--consistency=step") as replica:
            (tmp_path / "ranker_app.py").write_text(block.text.replace("127.0.0.1:7701", replica.address))
            from ranker_app import app  # type: ignore[import-not-found]

            serve.run(app)
            for _ in range(2):
                expected = [model(torch.tensor(_IDS)).tolist()] * 8  # of both processes
                deadline_s = time.monotonic() + _WAIT_S
                while (scores := [_answer(in_ray) for _ in expected]) != expected:
                    assert time.monotonic() < deadline_s, (scores, expected)
                optimizer.zero_grad()
                model(torch.tensor(_IDS)).sum().backward()
                optimizer.step()
                streamer.flush()
