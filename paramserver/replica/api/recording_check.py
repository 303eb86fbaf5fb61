"""Whether a served model answers what the trained one answered: replays the trainer's recordings at their steps."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace.kernels.recordings import Recording, RecordingName, difference, flatten
from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica
from headrace.paramserver.system.object_store import ObjectStore
from headrace.paramserver.system.text import first_of, format_seconds
from headrace.schemas.errors import ConfigError, CorruptionError, GoneError
from headrace.schemas.table_names import model_of
from headrace.schemas.version import Version

__all__ = ["RecordingCheck", "RecordingReport", "recording_families"]

_log = logging.getLogger(__name__)
# Pauses between looks for a file that is being written; and how soon a call notices that `watch` ends.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_STOP_TIMEOUT_S = 5.0  # a store that hangs does not keep a serving process from ending


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordingReport:
    """What one check found.

    Attributes:
        epoch, step: Of the recording that was compared; None if none was.
        difference: Largest absolute difference of the outputs; infinite where their structure, shape or type differs.
        is_equal: Every bit of the outputs is the same.
        agrees: It is equal, or the difference is at most the tolerance; False if nothing was compared.
        worst: Where the difference is, such as `outputs['score']`; empty if all is equal.
        skipped: Recordings that were not compared, and why.
    """

    epoch: int | None = None
    step: int | None = None
    difference: float = 0.0
    is_equal: bool = False
    agrees: bool = False
    worst: str = ""
    skipped: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.step is None:
            return f"nothing was compared: {first_of(self.skipped) if self.skipped else 'there is no recording'}"
        what = f"step {self.step} of epoch {self.epoch}"
        if self.is_equal:
            return f"served equals trained at {what}, bit for bit"
        return f"served differs from trained at {what}: by {self.difference:g} at most, in {self.worst}"


class RecordingCheck(Collector):
    """Compares what a served model answers with what the trained one did, by recordings of the trainer.

        with EmbeddingReplica(server, consistency="step") as replica:
            served = serve_model(net, replica)
            with RecordingCheck(served, "s3://bucket/recordings", replica).watch():
                ...  # serve

    The trainer calls `RawEmbeddingStreamer.record`. The replica hears of a recording with the step itself. While a
    check waits for one, lookups stay at that step until the file has come and the model has answered its batch, for
    `max_stay_s` at most. So rows get older by about a second at each recorded step.

    It covers all between the trained weights and the answer: rows, dense parameters, the order of keys, weights,
    pooling, and the user's own modules. Where training is on a GPU, or weights are stored rounded, bits differ: give a
    tolerance.

    It is a collector of Prometheus metrics: `prometheus_client.REGISTRY.register(check)`.

    Thread: any.

    Attributes:
        last: The last report of a comparison; None before.
        outcomes: How many recorded steps were `equal` (within the tolerance), `different`, and `missed`, because no
            file came; and how many checks have `failed`.
    """

    def __init__(
        self,
        served: Callable[..., Any],
        recordings: str,
        replica: EmbeddingReplica,
        *,
        model: str | None = None,
        tolerance: float = 0.0,
        max_stay_s: float = 10.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            served: The served model, or a function that stands for it. It is called with the recorded inputs: with its
                parts, if they are a tuple.
            recordings: The folder or URL that the trainer's setting `recordings` names.
            replica: That of the served model, by step.
            model: Name of the trained model; None takes that of the replica's tables.
            tolerance: Largest absolute difference that is no finding. 0 wants the same bits.
            max_stay_s: How long lookups stay at a recorded step whose file does not come.
            clock: For the time of the last comparison, seconds since 1970.

        Raises:
            ConfigError: The replica is not by step, has several models and none is named, or an argument is wrong.
        """
        if not tolerance >= 0:
            raise ConfigError(f"tolerance {tolerance!r} is not a number from 0 on")
        replica.check_by_step()
        models = sorted({model_of(name) for name in (*replica.tables, *replica.dense_tensors)})
        if model is None and len(models) != 1:
            raise ConfigError(f"the replica has the models {first_of(models)}: name that of the recordings, model=…")
        self._served, self._replica = served, replica
        self._model = models[0] if model is None else model
        self._name = RecordingName.of(self._model, 0, 0).model
        self._store = ObjectStore.at(recordings, deadline_s=max_stay_s)
        self._tolerance, self._max_stay_s, self._clock = tolerance, max_stay_s, clock
        self._compared: Version | None = None
        self._missed: Version | None = None
        self._compared_s = clock()
        self.outcomes = {"equal": 0, "different": 0, "missed": 0, "failed": 0}
        self.last: RecordingReport | None = None

    def check(self, timeout_s: float = 60.0, *, stopping: threading.Event | None = None) -> RecordingReport:
        """Compare one recording: that of the step that lookups see, or of the next recorded step; each only once.

        Args:
            timeout_s: How long to wait for a recorded step, seconds. Then the report says that nothing was compared,
                and why not the recordings that are there.
            stopping: Ends the wait when it is set.

        Raises:
            CorruptionError: A recording is torn, altered or no recording; the message names it.
            UnavailableError: The folder or the replica does not answer.
            HeadraceError: As for lookups. Whatever the served model raises is raised, too.
        """
        try:
            return self._check(time.monotonic() + timeout_s, stopping or threading.Event())
        except BaseException:
            self.outcomes["failed"] += 1
            raise

    @contextlib.contextmanager
    def watch(self, interval_s: float = 60.0) -> Iterator[RecordingCheck]:
        """Check on a thread of its own during the block, the next recorded step after each `interval_s`.

        Differences and failures are logged, and counted in the metrics.
        """
        stopping, name = threading.Event(), "headrace-recordings"
        thread = threading.Thread(target=self._watch, args=(interval_s, stopping), name=name, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            stopping.set()
            thread.join(_STOP_TIMEOUT_S)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they are now."""
        yield from recording_families(self.outcomes, self._compared_s, self.last)

    def _watch(self, interval_s: float, stopping: threading.Event) -> None:
        while not stopping.is_set():
            try:
                report = self.check(interval_s, stopping=stopping)
                if report.step is not None and not report.agrees:
                    _log.error("%s", report)
                if report.step is None:
                    _log.debug("%s", report)
                    continue  # it has waited
            except Exception as exc:  # also of the user's model
                _log.warning("no recording could be compared: %s", exc)
            stopping.wait(interval_s)

    def _check(self, deadline_s: float, stopping: threading.Event) -> RecordingReport:
        replica, missed = self._replica, list[str]()
        with replica.staying_at_recorded_steps(self._max_stay_s):
            shown: Version | None = (replica.epoch, replica.step)
            stay_s = 0.0  # a copy that was built at this step has not heard whether it is recorded
            while shown is not None:
                if shown != self._compared and (recording := self._find(shown, stay_s, stopping)) is not None:
                    if (report := self._compare(recording)) is not None:
                        return report
                    missed.append(f"{recording.name}: lookups went on to a later step")
                elif shown != self._compared and stay_s:
                    self._missed = shown
                    self.outcomes["missed"] += 1
                    missed.append(f"step {shown[1]} of epoch {shown[0]}: no file within {format_seconds(stay_s)}")
                shown = self._next_recorded(deadline_s, stopping)
                stay_s = 0.0 if shown == self._missed else self._max_stay_s
            return RecordingReport(skipped=(*missed, *self._describe_others()))

    def _next_recorded(self, deadline_s: float, stopping: threading.Event) -> Version | None:
        """Return the next step at which lookups stay; None after the deadline, or when it has to stop."""
        while not stopping.is_set():
            left_s = deadline_s - time.monotonic()
            if (version := self._replica.next_recorded_step(max(0.0, min(left_s, _LONGEST_PAUSE_S)))) is not None:
                return version
            if left_s <= 0:
                return None
        return None

    def _find(self, shown: Version, stay_s: float, stopping: threading.Event) -> Recording | None:
        """Return the recording of a step, once its file has come; None if it does not within `stay_s`."""
        name = str(RecordingName(self._name, *shown))
        until_s, pause_s = time.monotonic() + stay_s, _FIRST_PAUSE_S
        while True:
            with contextlib.suppress(GoneError):
                return self._read(name)
            if time.monotonic() >= until_s or stopping.wait(pause_s):
                return None
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _read(self, name: str) -> Recording:
        where = f"{self._store.where}/{name}"
        recording = Recording.decode(self._store.get(name), where)
        if (str(recording.name), recording.model) != (name, self._model):
            is_of = f"step {recording.step} of epoch {recording.epoch} of model {recording.model!r}"
            raise CorruptionError(f"{where}: is a recording of {is_of}, which belongs under another name")
        return recording

    def _compare(self, recording: Recording) -> RecordingReport | None:
        """Return the report; None if lookups are at another step by now."""
        inputs = recording.inputs.build()
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)

        def answer() -> tuple[Version, Any]:
            with torch.no_grad():
                return (self._replica.epoch, self._replica.step), self._served(*arguments)

        shown, answered = self._replica.at_one_moment(answer)
        if shown != (recording.epoch, recording.step):
            return None
        largest, is_equal, worst = difference(recording.outputs, flatten(answered, "outputs"))
        agrees = is_equal or largest <= self._tolerance > 0
        report = RecordingReport(
            epoch=shown[0], step=shown[1], difference=largest, is_equal=is_equal, agrees=agrees, worst=worst
        )
        self._compared, self._compared_s, self.last = shown, self._clock(), report
        self.outcomes["equal" if agrees else "different"] += 1
        return report

    def _describe_others(self) -> Iterator[str]:
        """Yield each recording in the folder, and why it is not compared now."""
        shown = self._replica.epoch, self._replica.step
        for path in sorted(each.path for each in self._store.list("")):
            name = RecordingName.parse(path)
            if name is None:
                why = "is not named as a recording"
            elif name.model != self._name:
                why = f"of another model than {self._model!r}"
            elif (version := (name.epoch, name.step)) == self._compared:
                why = "was compared"
            elif version == shown:
                why = "has just become visible"
            else:
                age = "older" if version < shown else "newer"
                why = f"{age} than step {shown[1]} of epoch {shown[0]}, which the replica shows"
            yield f"{path}: {why}"


def recording_families(counts: Mapping[str, int], compared_s: float, last: RecordingReport | None) -> Iterator[Metric]:
    """Yield a check's metrics: outcomes, when a recording was last compared, and the last report, if any."""
    name = "headrace_replica_recording"
    total = CounterMetricFamily(f"{name}s_total", "Recorded steps that were reached.", labels=["outcome"])
    for outcome, count in counts.items():
        total.add_metric([outcome], count)
    yield total
    text = "When a recording was last compared, or checks began."
    yield GaugeMetricFamily(f"{name}_timestamp_seconds", text, value=compared_s)
    if last is not None:
        text = "Largest absolute difference of the answers in the last comparison."
        yield GaugeMetricFamily(f"{name}_difference", text, value=last.difference)
        text = "1 while the last comparison found a difference above the tolerance."
        yield GaugeMetricFamily(f"{name}_differs", text, value=not last.agrees)
