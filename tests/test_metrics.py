from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_jax.metrics import METRICS, RunLog, metric_meaning, read_metrics


def _events(workdir: Path) -> EventAccumulator:
    return EventAccumulator(str(workdir / "tensorboard"), size_guidance={"tensors": 0}).Reload()


def _scalars(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


def _run(workdir: Path, steps: range, *, resume_step: int | None = None) -> None:
    with RunLog(workdir, resume_step=resume_step) as log:
        for step in steps:
            log.scalars(step, {"Training/Loss": step / 4})
            log.completions(step, [{"prompt": "p", "completion": str(step)}])


def test_scalars_reach_json_and_tensorboard(tmp_path):
    with RunLog(tmp_path) as log:
        log.scalars(1, {"Training/Loss": 0.5, "Policy/Entropy": np.float32(0.25)})
        log.scalars(2, {"Training/Loss": jnp.float32(-1.5)})
        # Flushed as it goes: readable before the log is closed.
        records = read_metrics(tmp_path / "metrics.jsonl")
        events = _events(tmp_path)
    assert [{name: r[name] for name in r if name != "time"} for r in records] == [
        {"step": 1, "Training/Loss": 0.5, "Policy/Entropy": 0.25},
        {"step": 2, "Training/Loss": -1.5},
    ]
    assert records[0]["time"] <= records[1]["time"]
    assert _scalars(events, "Training/Loss") == [(1, 0.5), (2, -1.5)]
    assert _scalars(events, "Policy/Entropy") == [(1, 0.25)]
    meaning = events.SummaryMetadata("Training/Loss").summary_description
    assert meaning == METRICS["Training/Loss"]


def test_not_finite_is_null_in_json_and_itself_in_tensorboard(tmp_path):
    values = {"Training/Loss": math.nan, "Policy/RatioMax": math.inf, "Policy/RatioMin": -math.inf}
    with RunLog(tmp_path) as log:
        log.scalars(1, values)
        log.completions(1, [{"rewards": np.array([1.0, np.nan], np.float32), "advantage": math.nan}])
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert [record[name] for name in values] == [None, None, None]
    (completion,) = read_metrics(tmp_path / "completions.jsonl")
    assert completion == {"step": 1, "rewards": [1.0, None], "advantage": None}
    events = _events(tmp_path)
    assert math.isnan(_scalars(events, "Training/Loss")[0][1])
    assert _scalars(events, "Policy/RatioMax") == [(1, math.inf)]


def test_histogram_counts_the_finite_values(tmp_path):
    with RunLog(tmp_path) as log:
        log.histogram(3, "Histogram/Rewards", np.array([[0.0, 1.0], [1.0, math.nan]]))
        log.histogram(3, "Histogram/Same", jnp.full((5,), 0.7))
        log.histogram(3, "Histogram/None", np.array([math.nan]))
        log.histogram(3, "Histogram/Empty", np.zeros((0,)))
    events = _events(tmp_path)
    assert sorted(events.Tags()["histograms"]) == ["Histogram/Rewards", "Histogram/Same"]
    (event,) = events.Histograms("Histogram/Rewards")
    histogram = event.histogram_value
    assert (event.step, histogram.num, histogram.min, histogram.max, histogram.sum) == (3, 3, 0, 1, 2)
    assert events.Histograms("Histogram/Same")[0].histogram_value.num == 5


@pytest.mark.parametrize("text", ["", "\ud800 lone", "line\nbreak \x00", "עברית", "x" * 100_000])
def test_any_text_is_written_and_read_back(tmp_path, text: str):
    with RunLog(tmp_path) as log:
        log.text(4, "Completions", text)
        log.completions(4, [{"prompt": text, "completion": text}])
    (record,) = read_metrics(tmp_path / "completions.jsonl")
    assert record == {"step": 4, "prompt": text, "completion": text}
    (event,) = _events(tmp_path).Tensors("Completions/text_summary")
    assert event.tensor_proto.string_val[0].decode() == text.replace("\ud800", "?")


def test_resume_cuts_what_came_after_the_step(tmp_path):
    _run(tmp_path, range(1, 6))
    _run(tmp_path, range(4, 7), resume_step=3)
    for name in ("metrics.jsonl", "completions.jsonl"):
        assert [record["step"] for record in read_metrics(tmp_path / name)] == [1, 2, 3, 4, 5, 6]
    # Steps 4 and 5 of the first run are hidden: each step once.
    assert _scalars(_events(tmp_path), "Training/Loss") == [(step, step / 4) for step in range(1, 7)]
    assert not list(tmp_path.glob("*.tmp"))


def test_resume_before_the_first_step_keeps_nothing_but_step_0(tmp_path):
    _run(tmp_path, range(0, 3))
    _run(tmp_path, range(1, 2), resume_step=0)
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]


@pytest.mark.parametrize("tail", ['{"step": 3, "ti', '{"step": 3', "{", '{"step": 3, "x": "\xc3'])
def test_half_written_last_line_is_left_out_and_cut(tmp_path, tail: str):
    _run(tmp_path, range(1, 3))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + tail.encode("latin-1"))
    assert [record["step"] for record in read_metrics(path)] == [1, 2]
    _run(tmp_path, range(3, 4), resume_step=2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_complete_last_line_without_its_line_end_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    RunLog(tmp_path, resume_step=2).close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_broken_line_in_the_middle_is_named(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\ngarbage\n{"step": 2}\n')
    assert [record["step"] for record in read_metrics(path)] == [1, 2]
    assert "line 2" in caplog.text


def test_new_run_in_the_folder_of_another_sets_it_aside(tmp_path):
    _run(tmp_path, range(1, 4))
    _run(tmp_path, range(1, 2))
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1]
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl.old")] == [1, 2, 3]
    assert _scalars(_events(tmp_path), "Training/Loss") == [(1, 0.25)]


def test_disabled_log_writes_nothing(tmp_path):
    with RunLog(tmp_path / "run", enabled=False) as log:
        log.scalars(1, {"Training/Loss": 1.0})
        log.histogram(1, "h", np.ones(3))
        log.completions(1, [{"prompt": "p"}])
        log.text(1, "t", "text")
    assert not (tmp_path / "run").exists()


def test_reading_a_missing_file_says_so(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_metrics(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("Training/Loss", "Training/Loss"),
        ("Training/Reward/format/Mean", "Training/Reward/<name>/Mean"),
        ("Training/Reward/a/b/Std", "Training/Reward/<name>/Std"),
        ("Training/RewardFailures/exact", "Training/RewardFailures/<name>"),
    ],
)
def test_meaning_of_a_metric(name: str, pattern: str):
    assert metric_meaning(name) == METRICS[pattern]


@pytest.mark.parametrize("name", ["Training/Los", "Training/Reward//Mean", "Training/RewardFailures/", ""])
def test_unknown_metric_has_no_meaning(name: str):
    assert metric_meaning(name) is None


def test_every_metric_has_a_group_and_one_line():
    assert isinstance(METRICS, Mapping)
    for name, meaning in METRICS.items():
        assert name.split("/")[0] in ("Policy", "Training", "Performance"), name
        # "|" would end a cell of the table in the README.
        assert meaning and "\n" not in meaning and "|" not in meaning, name
