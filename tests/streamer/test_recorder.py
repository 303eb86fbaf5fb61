"""When a recording is due, what it holds, what is in the folder, and what a trainer notices."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_shard import FakeStore
from streamed_training import Training, streaming
from torch import nn

from headrace.kernels.recordings import Recording, RecordingName
from headrace.paramserver.system.object_store import ObjectStore
from headrace.schemas.errors import ConfigError, StorageError
from headrace.streamer.recorder import Recorder, answer_of

BATCH = (torch.ones(3, 4), torch.arange(3))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.over, self.drop, self.frozen = nn.Linear(4, 2), nn.Dropout(0.5), nn.BatchNorm1d(2).eval()

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"score": self.drop(self.frozen(self.over(dense))) + ids[:, None]}


def recorder(folder: Path, *, model: str = "ctr", epoch: int = 1, **changed: Any) -> Recorder:
    fields = {"run": "run", "every_steps": 10, "max_kept": 3, **changed}
    return Recorder(str(folder), model=model, epoch=epoch, **fields)


def write(recorder: Recorder, *steps: int) -> None:
    for step in steps:
        assert recorder.write(recorder.take(step, BATCH, BATCH))
    recorder.close()


def steps_in(folder: Path) -> list[tuple[str, int, int]]:
    names = [RecordingName.parse(path.name) for path in sorted(folder.iterdir())]
    return [(name.model, name.epoch, name.step) for name in names if name is not None]


def test_the_first_step_is_due_and_then_one_in_so_many(tmp_path: Path) -> None:
    """Steps may be numbered by tens, and one is due once so many have passed since the last one."""
    each, due = recorder(tmp_path), list[int]()
    for step in (3, 4, 12, 13, 14, 30, 39, 40):
        if each.is_due(step):
            each.take(step, BATCH, BATCH)
            due.append(step)
    assert due == [3, 13, 30, 40]


def test_a_model_answers_in_eval_mode_and_is_as_before() -> None:
    """Dropout is off for the recording and on again behind it, a part in eval mode stays so; there is no gradient."""
    model = Model()
    first, second = answer_of(model, BATCH)["score"], answer_of(model, BATCH)["score"]
    assert torch.equal(first, second) and not first.requires_grad
    assert [module.training for module in model.modules()] == [True, True, True, False]
    assert not answer_of(lambda dense, _: model.over(dense), BATCH).requires_grad
    with pytest.raises(TypeError):
        answer_of(model, (1, 2, 3))
    assert model.training, "also after an error"


def test_inputs_are_those_before_the_model_saw_them(tmp_path: Path) -> None:
    """A model that writes into its inputs, and a batch that is reused, change nothing of a recording."""
    batch = torch.zeros(2)
    taken = recorder(tmp_path).take(1, batch, lambda values: values.add_(1))
    batch.add_(5)
    assert taken.inputs.tensors["inputs"].tolist() == [0, 0] and taken.outputs.tensors["outputs"].tolist() == [1, 1]


def test_the_newest_recordings_of_the_model_are_kept(tmp_path: Path) -> None:
    """Older ones of this model go, also those of earlier epochs; other models' and other files stay."""
    write(recorder(tmp_path, model="ctr-b"), 1, 2)
    (tmp_path / "notes.txt").write_text("mine")
    for step in range(1, 5):
        write(recorder(tmp_path, epoch=2), step)
    write(recorder(tmp_path, epoch=10), 1)
    assert steps_in(tmp_path) == [("ctr", 2, 3), ("ctr", 2, 4), ("ctr", 10, 1), ("ctr-b", 1, 1), ("ctr-b", 1, 2)]
    assert (tmp_path / "notes.txt").exists()
    path = tmp_path / str(RecordingName.of("ctr", 10, 1))
    found = Recording.decode(path.read_bytes(), str(path))
    assert (found.run, found.model, found.epoch, found.step) == ("run", "ctr", 10, 1)
    assert torch.equal(found.inputs.build()[0], BATCH[0])


def test_another_rank_writes_nothing(tmp_path: Path) -> None:
    """A rank that only takes part leaves the folder alone."""
    write(recorder(tmp_path, writes=False), 1)
    assert not steps_in(tmp_path)


class SlowStore(ObjectStore):
    """An object store that puts when it is told to."""

    may_put, is_putting = threading.Event(), threading.Event()

    def put(self, path: str, data: bytes) -> None:
        self.is_putting.set()
        assert self.may_put.wait(60)
        super().put(path, data)


def test_a_slow_folder_drops_recordings_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The training thread never waits: behind one that is being written and two that wait, more are dropped."""
    store = SlowStore.at(str(tmp_path))
    each = recorder(tmp_path, store=store)
    assert each.write(each.take(1, BATCH, BATCH)) and store.is_putting.wait(60)
    assert [each.write(each.take(step, BATCH, BATCH)) for step in (2, 3, 4)] == [True, True, False]
    assert each.num_dropped == 1 and "step 4 is not recorded: earlier recordings are being written" in caplog.text
    store.may_put.set()
    each.close()
    assert steps_in(tmp_path) == [("ctr", 1, 1), ("ctr", 1, 2), ("ctr", 1, 3)] and each.num_written == 3


class FailingStore(ObjectStore):
    """An object store without room."""

    def put(self, path: str, data: bytes) -> None:
        raise StorageError(f"{self.where}/{path}: No space left on device")


def test_a_folder_that_fails_drops_recordings_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be written is counted and logged."""
    each = recorder(tmp_path, store=FailingStore.at(str(tmp_path)))
    write(each, 1, 2)
    assert (each.num_written, each.num_dropped) == (0, 2)
    assert "step 2 is not recorded" in caplog.text and "No space left on device" in caplog.text


def test_a_recording_that_cannot_be_written_drops_no_later_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A type that files of tensors do not know is counted and logged, and the next recording is written."""
    each = recorder(tmp_path)
    assert each.write(each.take(1, torch.empty(2, dtype=torch.bits8), torch.zeros(2)))
    write(each, 2)
    assert (each.num_written, each.num_dropped) == (1, 1) and steps_in(tmp_path) == [("ctr", 1, 2)]
    assert "step 1 is not recorded: " in caplog.text and "bits8" in caplog.text


def test_what_is_too_large_is_refused(tmp_path: Path) -> None:
    """A recording is small: a batch of more than 256 MiB is refused with its size."""
    with pytest.raises(ConfigError, match=r"take 256\.0 MiB, more than 256\.0 MiB: give fewer"):
        recorder(tmp_path).take(1, torch.empty((256 << 20) + 1, dtype=torch.uint8), torch.zeros(1))
    with pytest.raises(ConfigError, match="not a URL of an object store"):
        Recorder("ftp://somewhere", run="run", model="ctr", epoch=1, every_steps=1, max_kept=1)


def test_a_call_that_is_not_due_costs_no_pass(store: FakeStore, training: Training, tmp_path: Path) -> None:
    """Steps between recordings call nothing and flush nothing; nor do those while streaming is paused."""
    calls = list[int]()

    def answer(users: torch.Tensor) -> torch.Tensor:
        calls.append(streamer.stats().step)
        return training.model.user(users)

    with streaming(store, training, recordings=str(tmp_path), record_every_steps=4) as streamer:
        recorded = list[bool]()
        for step in range(1, 11):
            training.step()
            if step == 5:
                streamer.pause()
            if step == 8:
                streamer.resume()
            recorded.append(streamer.record(BATCH[1:], answer))
        assert calls == [1, 8] and [step for step, is_recorded in enumerate(recorded, 1) if is_recorded] == calls
        assert streamer.stats().num_recordings_dropped == 0
        streamer.close()
        assert streamer.stats().num_recordings == 2
    assert steps_in(tmp_path) == [("default", 1, 1), ("default", 1, 8)]


def test_a_server_that_stalls_drops_recordings_and_training_goes_on(
    store: FakeStore, training: Training, tmp_path: Path
) -> None:
    """Without room for its rows, a recording is dropped and counted, and not tried again until the next one is due."""
    with streaming(store, training, recordings=str(tmp_path), record_every_steps=1) as streamer:
        for shard in store.shards:
            store.do(shard.gate.clear)
        for _ in range(3):  # one more than there are staging buffers
            training.step()
        assert not streamer.record(BATCH, BATCH)
        assert streamer.stats().num_recordings_dropped == 1
        for shard in store.shards:
            store.do(shard.gate.set)
        streamer.flush()
        assert not streamer.record(BATCH, BATCH), "a server that is away would cost each step as long"
        training.step()
        assert streamer.record(BATCH, BATCH)
    assert steps_in(tmp_path) == [("default", 1, 4)]


def test_recordings_need_a_folder(store: FakeStore, training: Training) -> None:
    """Without the setting the call says which one it needs."""
    with streaming(store, training) as streamer, pytest.raises(ConfigError, match="record: set `recordings`"):
        streamer.record(BATCH, BATCH)
