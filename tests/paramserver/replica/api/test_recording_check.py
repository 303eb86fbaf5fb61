"""A served model answers what the trained one answered, or the check of recordings says so."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from watched_server import wait_until

from headrace.kernels.recordings import RecordingName
from headrace.paramserver.replica import EmbeddingReplica, RecordingCheck, RecordingReport, serve_model
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError, CorruptionError
from headrace.streamer import RawEmbeddingStreamer

torchrec = pytest.importorskip("torchrec")

pytestmark = pytest.mark.torchrec
ROWS, DIM, BATCH = 40, 4, 8
WAIT_S = 60.0


class Ranker(nn.Module):
    """Bags of two features, an embedding of plain torch, and a dense part."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            torchrec.EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, feature_names=[name])
            for name in ("user", "item")
        ]
        self.bags = torchrec.EmbeddingBagCollection(tables=tables)
        self.place = nn.Embedding(ROWS, DIM)
        self.top = nn.Sequential(nn.Linear(3 * DIM, 4), nn.Dropout(0.5), nn.Linear(4, 1))

    def pooled(self, features: Any) -> torch.Tensor:
        return self.bags(features).values()  # type: ignore[no-any-return]

    def forward(self, features: Any, places: torch.Tensor) -> dict[str, torch.Tensor]:
        rows = torch.cat([self.pooled(features), self.place(places)], dim=1)
        return {"score": self.top(rows), "norm": rows.norm(dim=1)}


class Swapped(Ranker):
    """The same model, whose author takes the keys in another order."""

    def pooled(self, features: Any) -> torch.Tensor:
        rows = self.bags(features)
        return torch.cat([rows["item"], rows["user"]], dim=1)


class Averaging(Ranker):
    """The same model, whose author pools by means."""

    def pooled(self, features: Any) -> torch.Tensor:
        return super().pooled(features) / features.lengths().view(2, BATCH).T.repeat_interleave(DIM, dim=1)


def batch_of(seed: int, *, first_place: int = 0) -> tuple[Any, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 5, (2 * BATCH,), generator=generator)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    features = torchrec.KeyedJaggedTensor(["user", "item"], ids, lengths=lengths)
    return features, torch.arange(first_place, first_place + BATCH)


class Training:
    """A model that is trained on a server, and records each step that `record` is called at."""

    def __init__(self, server: ServerProcess, run: str, folder: Path, **settings: Any) -> None:
        self.model = Ranker()
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.1)
        # The dense part goes out with recordings only, so that nothing but these ends a step exactly.
        settings = {"record_every_steps": 1, "dense_interval_s": 1000, "freshness_s": 0, **settings}
        self.streamer = RawEmbeddingStreamer(server.address, run=run, model=run, recordings=str(folder), **settings)
        self.streamer.attach(self.model, self.optimizer, publish="all", dense=True)
        self.streamer.flush()
        self.num_steps = 0

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.num_steps += 1
        self.model(*batch_of(self.num_steps))["score"].pow(2).sum().backward()
        self.optimizer.step()

    def record(self) -> bool:
        return self.streamer.record(batch_of(1000 + self.num_steps, first_place=4), self.model)

    def version(self) -> tuple[int, int]:
        return self.streamer.epoch, self.num_steps


@pytest.fixture
def training(server: ServerProcess, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Training]:
    torch.manual_seed(3)
    training = Training(server, request.node.name.replace("[", "-").replace("]", ""), tmp_path / "recordings")
    yield training
    training.streamer.close(flush=False)


@pytest.fixture
def replica(server: ServerProcess, training: Training) -> Iterator[EmbeddingReplica]:
    with EmbeddingReplica(server.address, consistency="step", model=training.streamer.model) as replica:
        yield replica


def check_of(training: Training, replica: EmbeddingReplica, served: Any = None, **settings: Any) -> RecordingCheck:
    served = serve_model(training.model, replica) if served is None else served
    return RecordingCheck(served, str(training.streamer.config.recordings), replica, **settings)


def found(report: RecordingReport) -> tuple[int | None, int | None]:
    return report.epoch, report.step


def values_of(check: RecordingCheck) -> dict[str, float]:
    name = "headrace_replica_recording"
    samples = [sample for family in check.collect() for sample in family.samples]
    return {
        sample.labels.get("outcome", sample.name.removeprefix(name).lstrip("_")): sample.value for sample in samples
    }


def test_every_recorded_step_is_compared_and_equal(training: Training, replica: EmbeddingReplica) -> None:
    """Of steps that follow each other at once, the recorded ones are all shown, and answers equal bit for bit."""
    check = check_of(training, replica, clock=iter(range(100)).__next__)
    assert values_of(check) == {"equal": 0, "different": 0, "missed": 0, "failed": 0, "timestamp_seconds": 0}
    with replica.staying_at_recorded_steps():  # from the first recorded step on
        for _ in range(4):
            for _ in range(3):
                training.step()
            assert training.record()
        training.step()
        training.streamer.flush()
        first = replica.next_recorded_step(WAIT_S)
        assert first == (training.streamer.epoch, 3) == (replica.epoch, replica.step)
        assert not training.model.state_dict()["place.weight"].equal(serve_rows(replica))
        second = replica.next_recorded_step(WAIT_S)
        assert second == (training.streamer.epoch, 6)
    replica.wait_for(13, WAIT_S, epoch=training.streamer.epoch)
    assert training.model.state_dict()["place.weight"].equal(serve_rows(replica)), "the replica goes on behind it"

    reports = []
    for _ in range(3):
        checked = in_thread(check)
        training.step()
        training.record()
        reports.append(checked())
    assert [found(report) for report in reports] == [(training.streamer.epoch, step) for step in (14, 15, 16)]
    assert all(report.is_equal and report.agrees and report.difference == 0 for report in reports)
    assert str(reports[-1]) == f"served equals trained at step 16 of epoch {training.streamer.epoch}, bit for bit"
    told = values_of(check)
    assert (told["equal"], told["different"], told["timestamp_seconds"], told["differs"]) == (3, 0, 3, 0)


def serve_rows(replica: EmbeddingReplica) -> torch.Tensor:
    return replica.lookup("place.weight", torch.arange(ROWS))


def in_thread(check: RecordingCheck) -> Any:
    """Begin a check; return a function that returns its report."""
    reports: list[RecordingReport] = []
    thread = threading.Thread(target=lambda: reports.append(check.check(WAIT_S)))
    thread.start()

    def end() -> RecordingReport:
        thread.join(2 * WAIT_S)
        return reports[0]

    return end


def test_a_step_at_which_lookups_stand_already(server: ServerProcess, training: Training) -> None:
    """The last step of a run is compared, by replicas that have followed it and by one that begins there."""
    with EmbeddingReplica(server.address, consistency="step", model=training.streamer.model) as replica:
        training.step()
        training.record()
        replica.wait_for(1, WAIT_S, epoch=training.streamer.epoch)
        check = check_of(training, replica)
        assert found(check.check(WAIT_S)) == training.version()
        again = check.check(0)
        name = RecordingName.of(training.streamer.model, *training.version())
        assert again.step is None and again.skipped == (f"{name}: was compared",)
    training.streamer.flush()
    with EmbeddingReplica(server.address, consistency="step", model=training.streamer.model) as replica:
        assert found(check_of(training, replica).check(WAIT_S)) == training.version()


def swapped_keys(training: Training, replica: EmbeddingReplica) -> Any:
    return serve_model(Swapped(), replica)


def other_pooling(training: Training, replica: EmbeddingReplica) -> Any:
    return serve_model(Averaging(), replica)


def dense_of_another_step(training: Training, replica: EmbeddingReplica) -> Any:
    return serve_model(copy.deepcopy(training.model), replica, keep=["top.0.bias"])


def stale_row(training: Training, replica: EmbeddingReplica) -> Any:
    training.model.place.weight.detach().numpy()[BATCH] += 0.5  # a change that no tap can see
    return serve_model(training.model, replica)


def dropout_left_on(training: Training, replica: EmbeddingReplica) -> Any:
    return serve_model(training.model, replica).train()


FAULTS = [swapped_keys, other_pooling, dense_of_another_step, stale_row, dropout_left_on]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(training: Training, replica: EmbeddingReplica, plant: Any) -> None:
    """Whatever is wrong between trained weights and the answer is reported with its size, and in the metrics."""
    training.step()
    training.streamer.flush()
    served = plant(training, replica)
    check = check_of(training, replica, served)
    training.step()
    assert training.record()
    report = check.check(WAIT_S)
    assert found(report) == training.version() and not report.is_equal and not report.agrees
    assert 0 < report.difference < math.inf and report.worst in ("outputs['score']", "outputs['norm']")
    assert str(report).startswith("served differs from trained at step 2") and check.last == report
    told = values_of(check)
    assert (told["different"], told["differs"], told["difference"]) == (1, 1, report.difference)
    tolerant = check_of(training, replica, served, tolerance=report.difference + 1e3)
    if plant is not dropout_left_on:
        assert tolerant.check(WAIT_S).agrees


def test_what_is_not_compared_is_named(training: Training, replica: EmbeddingReplica, tmp_path: Path) -> None:
    """A check that compares nothing says so, and why each recording was skipped; one that is missing is counted."""
    folder = tmp_path / "recordings"
    check = check_of(training, replica, max_stay_s=0.05)
    assert str(check.check(0)) == "nothing was compared: there is no recording"
    training.step()
    training.record()
    assert check.check(WAIT_S).is_equal
    training.streamer.close()  # also ends the writing
    epoch, model = training.streamer.epoch, training.streamer.model
    data = (folder / str(RecordingName.of(model, epoch, 1))).read_bytes()
    names = {
        "older": RecordingName.of(model, epoch, 0),
        "newer": RecordingName.of(model, epoch, 7),
        "other": RecordingName.of("other", epoch, 1),
    }
    for name in names.values():
        (folder / str(name)).write_bytes(data)
    (folder / "notes.txt").write_text("mine")
    report = check.check(0)
    assert report.step is None and not report.agrees and check.last is not None and check.last.step == 1
    assert report.skipped == tuple(
        sorted(
            [
                f"{names['older']}: older than step 1 of epoch {epoch}, which the replica shows",
                f"{RecordingName.of(model, epoch, 1)}: was compared",
                f"{names['newer']}: newer than step 1 of epoch {epoch}, which the replica shows",
                f"{names['other']}: of another model than {model!r}",
                "notes.txt: is not named as a recording",
            ]
        )
    )


def test_a_file_that_does_not_come_holds_nothing_up(
    training: Training, replica: EmbeddingReplica, tmp_path: Path
) -> None:
    """Lookups leave a recorded step whose file is missing; the check counts it once, and takes the next one."""
    elsewhere = tmp_path / "elsewhere"
    check = RecordingCheck(serve_model(training.model, replica), str(elsewhere), replica, max_stay_s=0.05)
    training.step()
    training.record()
    training.streamer.flush()
    replica.wait_for(1, WAIT_S, epoch=training.streamer.epoch)
    (missed, *_), again = check.check(0).skipped, check.check(0)
    assert missed == f"step 1 of epoch {training.streamer.epoch}: no file within 0.05 s"
    assert not again.skipped and values_of(check)["missed"] == 1
    training.step()
    training.streamer.flush()
    replica.wait_for(2, WAIT_S, epoch=training.streamer.epoch)
    training.step()
    training.record()
    training.streamer.close()
    for path in (tmp_path / "recordings").iterdir():
        path.rename(elsewhere / path.name)
    assert found(check.check(WAIT_S)) == training.version()


def test_an_answer_of_a_later_step_is_not_compared(server: ServerProcess, training: Training) -> None:
    """A step that becomes visible while the model answers makes no finding: the report names the skipped recording."""
    training.step()
    training.record()
    training.streamer.flush()
    name = RecordingName.of(training.streamer.model, *training.version())
    # A replica that begins at a step has not heard that it is recorded, and does not stay there.
    with EmbeddingReplica(server.address, consistency="step", model=training.streamer.model) as replica:
        served, is_first = serve_model(training.model, replica), [True]

        def answer(*batch: Any) -> Any:
            if is_first.pop() if is_first else False:
                with torch.enable_grad():
                    training.step()
                training.streamer.flush()
                replica.wait_for(2, WAIT_S, epoch=training.streamer.epoch)
            return served(*batch)

        wait_until(lambda: training.streamer.stats().num_recordings, "the file")
        check = check_of(training, replica, answer)
        report = check.check(0)
        assert report.step is None and report.skipped[0] == f"{name}: lookups went on to a later step"
        assert values_of(check)["different"] == 0


def test_a_torn_file_is_refused_by_name(training: Training, replica: EmbeddingReplica, tmp_path: Path) -> None:
    """A damaged recording, and one under another's name, raise with the file's name, and count as failed."""
    check = check_of(training, replica)
    training.step()
    training.record()
    replica.wait_for(1, WAIT_S, epoch=training.streamer.epoch)
    training.streamer.close()
    path = tmp_path / "recordings" / str(RecordingName.of(training.streamer.model, *training.version()))
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(CorruptionError, match=f"{path.name}: torn, or no recording"):
        check.check(0)
    path.write_bytes(data.replace(b'step\\": 1', b'step\\": 2'))
    with pytest.raises(CorruptionError, match=f"{path.name}: its bytes are not those"):
        check.check(0)
    assert values_of(check)["failed"] == 2
    path.write_bytes(data)
    assert check.check(WAIT_S).is_equal


def test_a_watch_compares_by_itself(
    training: Training, replica: EmbeddingReplica, caplog: pytest.LogCaptureFixture
) -> None:
    """On its own thread the check finds what differs, logs it, and outlives an error of the served model."""
    may_fail, compared = threading.Event(), threading.Event()
    served = serve_model(training.model, replica)

    def answer(*batch: Any) -> Any:
        if not may_fail.is_set():
            may_fail.set()
            raise RuntimeError("the model has a bug")
        compared.set()
        return {"score": served(*batch)["score"] + 1.0, "norm": served(*batch)["norm"]}

    check = check_of(training, replica, answer)
    with check.watch(interval_s=0.01):
        training.step()
        training.record()
        assert may_fail.wait(WAIT_S) and compared.wait(WAIT_S)
        training.step()
        training.streamer.flush()
        replica.wait_for(2, WAIT_S, epoch=training.streamer.epoch)
    assert "no recording could be compared: the model has a bug" in caplog.text
    assert "served differs from trained at step 1" in caplog.text and "by 1 at most" in caplog.text
    told = values_of(check)
    assert (told["different"], told["failed"], told["difference"]) == (1, 1, pytest.approx(1.0))


def test_wrong_uses_are_refused(server: ServerProcess, training: Training, replica: EmbeddingReplica) -> None:
    """A replica that is not by step, a model that is not named among several, and a place that is none."""
    with (
        EmbeddingReplica(server.address, model=training.streamer.model) as latest,
        pytest.raises(ConfigError, match='open the replica with consistency="step"'),
    ):
        check_of(training, latest)
    with pytest.raises(ConfigError, match="tolerance nan is not a number from 0 on"):
        check_of(training, replica, tolerance=math.nan)
    with pytest.raises(ConfigError, match="not a URL of an object store"):
        RecordingCheck(training.model, "ftp://somewhere", replica)


def test_lookups_go_on_while_a_check_hangs(training: Training, replica: EmbeddingReplica) -> None:
    """Whatever a check waits for, updates become visible after `max_stay_s`, and it goes on with a later step."""
    with replica.staying_at_recorded_steps(max_stay_s=0.01):
        for _ in range(3):
            training.step()
            training.record()
        first = replica.next_recorded_step(WAIT_S)
        replica.wait_for(3, WAIT_S, epoch=training.streamer.epoch)
        training.step()
        training.record()
        assert first is not None and replica.next_recorded_step(WAIT_S) in {(first[0], 3), (first[0], 4)}
