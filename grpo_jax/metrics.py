"""What a run writes about itself: JSON lines for programs, TensorBoard events for people.

``metrics.jsonl`` holds one line a step, ``completions.jsonl`` a few completions a step, ``tensorboard/`` the
same numbers and histograms as events. :data:`METRICS` is the one table of what is measured.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import numpy as np
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog

_log = logging.getLogger(__name__)

METRICS: dict[str, str] = {
    "Policy/Entropy": "Exact entropy of the next-token distribution, nats a token",
    "Policy/KL": "KL divergence to the reference policy (k3 estimator), nats a token",
    "Policy/RatioMax": "Largest ratio of the new to the old probability of a token",
    "Policy/RatioMin": "Smallest ratio of the new to the old probability of a token",
    "Policy/ClipLow": "Share of tokens whose gradient the lower clip removed or bounded",
    "Policy/ClipHigh": "Share of tokens whose gradient the upper clip removed or bounded",
    "Policy/ClipFraction": "Share of tokens clipped on either side",
    "Policy/SamplerGapMean": "Mean absolute gap between the policy's and the sampler's log-probabilities; real "
    "where the sampler truncates the distribution or is an update behind, else rounding",
    "Policy/SamplerGapMax": "Largest such gap of a token",
    "Policy/ImportanceMean": "Mean importance weight: the policy before this batch's updates over the sampler",
    "Policy/ImportanceClipped": "Share of tokens whose importance weight was cut to its cap",
    "Policy/ImportanceDropped": "Share of tokens whose importance weight lay outside its band and became 0",
    "Training/Loss": "The whole loss: surrogate, KL and entropy terms",
    "Training/PolicyLoss": "The surrogate's part of the loss",
    "Training/KLLoss": "The KL term's part of the loss, beta included",
    "Training/EntropyLoss": "The entropy bonus's part of the loss, its coefficient included",
    "Training/AdvantageNorm": "Root mean square of the advantages",
    "Training/GradNorm": "Global norm of the gradient before clipping",
    "Training/UpdateNorm": "Global norm of the step that the optimizer took",
    "Training/LearningRate": "Learning rate of the update",
    "Training/NonFiniteSkipped": "Updates skipped so far because a gradient was not finite",
    "Training/RewardMean": "Mean combined reward of the batch",
    "Training/RewardStd": "Standard deviation of the combined reward over the batch",
    "Training/Reward/<name>/Mean": "Mean of this reward function over the completions it scored",
    "Training/Reward/<name>/Std": "Standard deviation of this reward function over the completions it scored",
    "Training/RewardFailures/<name>": "Completions where this reward function raised or gave an infinite number",
    "Training/MissingRewards": "Share of completions without any reward",
    "Training/ZeroSpreadGroups": "Share of groups whose rewards are all equal",
    "Training/ExtraRollouts": "Rollouts drawn to replace groups without spread",
    "Training/OverlongPenalty": "Mean penalty of long completions, in addition to the combined reward",
    "Training/KLPenalty": "Mean of what the KL takes off the reward, beta included",
    "Training/Epoch": "Passes over the training prompts drawn so far, those sampled a step ahead included",
    "Performance/SuccessRate": "Share of the batch's completions with a correct answer",
    "Performance/CompletionLength": "Mean completion length in tokens",
    "Performance/CompletionLengthMax": "Longest completion in tokens",
    "Performance/TruncatedShare": "Share of completions cut off at the length limit",
    "Performance/TokensPerSecond": "Completion tokens a second of the whole step",
    "Performance/RolloutSeconds": "Seconds of the step given to sampling (a step ahead: of the next batch)",
    "Performance/RewardSeconds": "Seconds of the step given to reward functions, those beside sampling left out",
    "Performance/ScoreSeconds": "Seconds of the step given to old and reference log-probabilities",
    "Performance/UpdateSeconds": "Seconds of the step given to optimizer updates",
    "Performance/StepSeconds": "Seconds of the whole step, the sum of the four above",
    "Performance/RolloutWaitSeconds": "Seconds that the host was blocked until completions were there",
    "Performance/RewardWaitSeconds": "Seconds that rewards were waited for with nothing to do for the device",
    "Performance/RewardRunSeconds": "Seconds that reward functions and verdicts ran, beside sampling or not",
    "Performance/HeldOut/SuccessRate": "Share of correct samples on held-out problems, at temperature",
    "Performance/HeldOut/GreedyAccuracy": "Share of held-out problems solved by greedy decoding",
    "Performance/CompiledPrograms": "Programs compiled so far; constant once the run has warmed up",
}
"""Every metric of a run and its meaning; ``<name>`` stands for the name of a reward function."""


def metric_meaning(name: str) -> str | None:
    """The meaning of a metric, names of reward functions resolved; None if :data:`METRICS` lacks it."""
    if name in METRICS:
        return METRICS[name]
    for pattern, meaning in METRICS.items():
        before, wildcard, after = pattern.partition("<name>")
        long_enough = len(name) > len(before) + len(after)
        if wildcard and long_enough and name.startswith(before) and name.endswith(after):
            return meaning
    return None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file, in order; a half-written last line is left out.

    Raises:
        FileNotFoundError: there is no such file.
    """
    return [record for _, record in _records(path)]


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (line, record) of every line that parses; warn of others, except a half-written last one."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                record = None
            if isinstance(record, dict) and "step" in record:
                yield line.rstrip("\n"), record
            elif line.endswith("\n"):
                _log.warning("%s: line %d is not a record and is left out", path, number)


def _open_jsonl(path: Path, resume_step: int | None) -> TextIO:
    """Open for appending; earlier records after ``resume_step`` are cut, those of another run set aside."""
    if path.exists():
        if resume_step is None:
            os.replace(path, path.with_name(path.name + ".old"))
        else:
            beside = path.with_name(path.name + ".tmp")
            with beside.open("w", encoding="utf-8") as file:
                for line, record in _records(path):
                    if record["step"] <= resume_step:
                        file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
    return path.open("a", encoding="utf-8")


def _jsonable(value: Any) -> Any:
    """``value`` with arrays as lists and non-finite numbers as None: JSON has neither."""
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if hasattr(value, "tolist"):
        return _jsonable(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _valid_unicode(text: str) -> str:
    """``text`` with lone surrogates replaced; protocol buffers hold UTF-8 only."""
    return text.encode("utf-8", "replace").decode("utf-8")


class RunLog:
    """The files of one run: ``metrics.jsonl``, ``completions.jsonl`` and ``tensorboard/`` in ``workdir``.

    Lines are flushed as they are written, so that a killed process loses at most the line it was writing.

    Args:
        workdir: the run's folder; made if it does not exist.
        resume_step: the run goes on after this step. JSON lines of later steps are cut, and TensorBoard hides
            its events of later steps. None: a new run; what an earlier one wrote here is set aside
            (``metrics.jsonl.old``) and hidden from TensorBoard.
        enabled: False makes an object that writes nothing, for all processes but the first.
    """

    def __init__(self, workdir: Path, *, resume_step: int | None = None, enabled: bool = True) -> None:
        self._enabled = enabled
        self._described: set[str] = set()
        if not enabled:
            return
        events = workdir / "tensorboard"
        events.mkdir(parents=True, exist_ok=True)
        self._metrics = _open_jsonl(workdir / "metrics.jsonl", resume_step)
        self._completions = _open_jsonl(workdir / "completions.jsonl", resume_step)
        earlier = any(events.iterdir())
        # Event files are named by the second and read in the order of their names: the nanoseconds keep a
        # quick restart from writing over the file before it.
        self._events = EventsWriter(str(events / "events"), f".{time.time_ns():020d}")
        if earlier:
            first = 0 if resume_step is None else resume_step + 1
            self._write_event(first, session_log=SessionLog(status=SessionLog.START))
            self._events.flush()

    def _write_event(self, step: int, **content: Any) -> None:
        self._events.write_event(Event(step=step, wall_time=time.time(), **content))

    def _write_line(self, file: TextIO, step: int, record: Mapping[str, Any]) -> None:
        line = {"step": step} | _jsonable(record)
        file.write(json.dumps(line, allow_nan=False) + "\n")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one line of metrics and their TensorBoard scalars; NaN and infinity are null in JSON."""
        if not self._enabled:
            return
        numbers = {name: float(value) for name, value in values.items()}
        self._write_line(self._metrics, step, {"time": time.time()} | numbers)
        self._metrics.flush()
        for name, value in numbers.items():
            # TensorBoard reads a description from a tag's first event.
            meaning = "" if name in self._described else metric_meaning(name) or ""
            self._described.add(name)
            self._write_event(step, summary=summary.scalar(name, value, summary_description=meaning))
        self._events.flush()

    def histogram(self, step: int, name: str, values: Any) -> None:
        """Write a TensorBoard histogram of an array's finite values; nothing if it has none."""
        if not self._enabled:
            return
        array = np.asarray(values, np.float64)
        finite = array[np.isfinite(array)]
        if finite.size:
            self._write_event(step, summary=summary.histogram(name, finite, bins=64))

    def completions(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Write one line a record: the step and what the record holds (strings, numbers, lists)."""
        if not self._enabled:
            return
        for record in records:
            self._write_line(self._completions, step, record)
        self._completions.flush()

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text to TensorBoard (Markdown)."""
        if self._enabled:
            self._write_event(step, summary=summary.text(name, _valid_unicode(text)))
            self._events.flush()

    def close(self) -> None:
        """Flush and close all files; the object writes nothing afterwards."""
        if self._enabled:
            self._enabled = False
            self._metrics.close()
            self._completions.close()
            self._events.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
