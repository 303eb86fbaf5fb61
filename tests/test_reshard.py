"""A server with another number of shards takes the place of a running one, under training: real processes."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from counted_training import ROWS, Training, assert_equal, settle

from headrace.cli import main
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import HeadraceError


def test_training_goes_on_at_the_new_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No acked row is lost; the old server says where the new one is, which starts again by the same flags."""
    with ServerProcess.start(tmp_path / "old", shards=2) as old, contextlib.ExitStack() as stack:
        training = Training(old.address, flush_timeout_s=1.0)
        start = partial(ServerProcess.start, tmp_path / "new", shards=3, reshard=old.address)
        acked_step = 0
        with ThreadPoolExecutor(1) as pool:
            starting = pool.submit(start)
            with contextlib.suppress(HeadraceError):
                while not starting.done():
                    training.step()
                    training.flush()
                    acked_step = training.num_steps
        new = starting.result()
        with contextlib.suppress(HeadraceError):
            training.close()
        assert acked_step > 0
        training.address = new.address
        with training.replica() as replica:
            for name in training.model:
                rows = replica.lookup(f"{name}.weight", torch.arange(ROWS))
                assert rows.min() >= acked_step, "an acked row is lost"
        port = int(new.address.rpartition(":")[2])
        new.kill()
        new.close()
        stack.enter_context(start(port=port))
        assert main(["status", "--server", old.address]) == 1
        assert new.address in capsys.readouterr().err
        again = Training(new.address)
        again.step()
        with again.replica() as replica:
            settle(replica, again)
            assert_equal(replica, again)
        again.close()
