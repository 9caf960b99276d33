"""Whole runs of a tiny model through the command line: files, resuming, rewards that fail, the loop's variants."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_jax.checkpoint import Checkpointer
from grpo_jax.cli.experiment import load_experiment
from grpo_jax.config import config_from_dict, config_to_dict
from grpo_jax.metrics import metric_meaning, read_metrics
from grpo_jax.train.session import Session, build_policy
from grpo_jax.types import TrainState
from tests.train.conftest import FinishedRun, command

TIMES = ("time", "Performance/CompiledPrograms", "Performance/TokensPerSecond")


def timeless(folder: Path) -> list[dict[str, Any]]:
    """A run's metrics without those that tell time."""
    return [
        {name: v for name, v in record.items() if not (name in TIMES or name.endswith("Seconds"))}
        for record in read_metrics(folder / "metrics.jsonl")
    ]


def weights(folder: Path, step: int) -> dict[str, np.ndarray]:
    checkpoints = Checkpointer(folder / "checkpoints", keep=1, keep_best=0)
    params = checkpoints.restore_params(step)
    checkpoints.close()
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(params)}


def assert_equal_weights(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name, x in a.items():
        np.testing.assert_array_equal(x, b[name], err_msg=name)


def steps_saved(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


# What a run leaves behind


def test_metrics_have_a_meaning_and_a_record_a_step(finished: FinishedRun) -> None:
    records = read_metrics(finished.folder / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    for record in records:
        names = record.keys() - {"step", "time"}
        assert [name for name in names if metric_meaning(name) is None] == []
        assert all(isinstance(value, (int, float)) for value in record.values())
    # One evaluation, after the last step.
    assert ["Performance/HeldOut/SuccessRate" in record for record in records] == [False] * 3 + [True]
    stages = ("Rollout", "Reward", "Score", "Update")
    for record in records:
        total = sum(record[f"Performance/{stage}Seconds"] for stage in stages)
        assert record["Performance/StepSeconds"] == pytest.approx(total)
        tokens = record["Performance/CompletionLength"] * 8 * 4
        assert record["Performance/TokensPerSecond"] == pytest.approx(tokens / total)


def test_nothing_compiles_after_the_first_steps(finished: FinishedRun) -> None:
    _, *later = (r["Performance/CompiledPrograms"] for r in read_metrics(finished.folder / "metrics.jsonl"))
    assert len(set(later)) == 1 and later[0] > 0


def test_sampler_and_trainer_agree_at_each_step(finished: FinishedRun) -> None:
    for record in read_metrics(finished.folder / "metrics.jsonl"):
        assert record["Policy/SamplerGapMax"] < 1e-4
        assert record["Policy/RatioMin"] == record["Policy/RatioMax"] == 1.0  # one update a batch


def test_the_weights_move(finished: FinishedRun) -> None:
    before, after = weights(finished.folder, 0), weights(finished.folder, 4)
    assert all((before[name] != x).any() for name, x in after.items())


def test_tensorboard_shows_what_the_file_says(finished: FinishedRun) -> None:
    events = EventAccumulator(str(finished.folder / "tensorboard"))
    events.Reload()
    records = read_metrics(finished.folder / "metrics.jsonl")
    assert set(events.Tags()["scalars"]) == {name for r in records for name in r} - {"step", "time"}
    for name in events.Tags()["scalars"]:
        shown = {event.step: event.value for event in events.Scalars(name)}
        # TensorBoard keeps float32.
        assert shown == {r["step"]: float(np.float32(r[name])) for r in records if name in r}
    assert events.Tags()["histograms"] == ["Training/Rewards"]


def test_completions_and_their_rewards(finished: FinishedRun) -> None:
    lines = (finished.folder / "completions.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [r["step"] for r in records] == [step for step in (1, 2, 3, 4) for _ in range(32)]
    for record in records:
        assert set(record) == {
            "step", "prompt", "answer", "completion", "rewards", "reward", "advantage", "length", "finished",
        }  # fmt: skip
        text = record["completion"]
        rewards = record["rewards"]
        assert record["answer"] == "".join(sorted(record["prompt"][:-1]))
        assert rewards["exact"] == (text == record["answer"])
        assert rewards["length"] == len(text) / 8
        assert rewards["belongs"] == 1.0
        assert rewards["picky"] == (None if text == "" or "9" in text else 0.25)
        assert record["reward"] == rewards["exact"] + rewards["length"] + (rewards["picky"] or 0)
        # The end-of-sequence token counts, and a sampled pad token, which has no text either.
        assert len(text) + record["finished"] <= record["length"] <= 8
        assert record["finished"] or record["length"] == 8
    for start in range(0, len(records), 4):
        group = records[start : start + 4]
        assert len({r["prompt"] for r in group}) == 1
        rewards = np.array([r["reward"] for r in group])
        expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        np.testing.assert_allclose([r["advantage"] for r in group], expected, atol=1e-5)  # float32


def test_a_reward_that_raises_is_counted(finished: FinishedRun) -> None:
    completions = [json.loads(line) for line in (finished.folder / "completions.jsonl").read_text().splitlines()]
    for record in read_metrics(finished.folder / "metrics.jsonl"):
        nines = sum("9" in c["completion"] for c in completions if c["step"] == record["step"])
        assert record["Training/RewardFailures/picky"] == nines > 0
        assert record["Training/RewardFailures/belongs"] == record["Training/RewardFailures/length"] == 0
        assert record["Training/MissingRewards"] == 0  # other functions gave a reward


def test_config_and_experiment_are_kept(finished: FinishedRun) -> None:
    config = load_experiment(finished.experiment).config
    assert config_from_dict(json.loads((finished.folder / "config.json").read_text())) == config
    assert (finished.folder / "experiment.py").read_text() == finished.experiment.read_text()
    assert steps_saved(finished.folder) == [0, 4]


def test_piped_output_is_plain_lines(finished: FinishedRun) -> None:
    out = finished.ended.out
    assert "\x1b" not in out and "\r" not in out
    steps = [line for line in out.splitlines() if line.startswith("step ") and " | " in line]
    assert [line.split(" | ")[0] for line in steps] == [f"step {n}/4" for n in (1, 2, 3, 4)]
    assert out.count("completions of step") == 3  # 1, 2 and 4
    assert "The run is finished" in out and f"grpo-jax eval {finished.folder}" in out
    assert finished.ended.err == ""


# Going on


def test_a_finished_run_is_not_trained_again(finished: FinishedRun, tmp_path: Path) -> None:
    run = finished.copy(tmp_path / "run")
    ended = command("train", finished.experiment, "--workdir", run)
    assert ended.status == 0 and "The run is finished" in ended.out and "step 4/4" not in ended.out
    assert timeless(run) == timeless(finished.folder)
    assert steps_saved(run) == [0, 4]


def test_interrupted_killed_and_extended_runs_equal_an_uninterrupted_one(
    finished: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    train = ("train", finished.experiment, "--workdir", run)
    monkeypatch.setenv("SIGINT_IN_CALL", "2")
    monkeypatch.setenv("SIGINTS", "1")
    ended = command(*train, "--train.steps", "3")
    assert ended.status == 130 and "stopped after step 2 of 3" in ended.out
    assert steps_saved(run) == [0, 2]
    # A second Ctrl-C ends the run where it stands: in step 4, whose step 3 is logged but not saved.
    monkeypatch.setenv("SIGINTS", "2")
    ended = command(*train)
    assert ended.status == 130 and "Traceback" not in ended.err
    assert steps_saved(run) == [0, 2] and len(timeless(run)) == 3
    monkeypatch.delenv("SIGINT_IN_CALL")
    ended = command(*train)
    assert ended.status == 0 and "going on from the checkpoint of step 2" in ended.out
    assert timeless(run) == timeless(finished.folder)
    assert (run / "completions.jsonl").read_text() == (finished.folder / "completions.jsonl").read_text()
    assert_equal_weights(weights(run, 4), weights(finished.folder, 4))


def test_another_config_is_refused_or_starts_over_beside(finished: FinishedRun, tmp_path: Path) -> None:
    run = finished.copy(tmp_path / "run")
    other = ("train", finished.experiment, "--workdir", run, "--train.shuffle-rewards", "--train.steps", "1")
    ended = command(*other, "--seed", "1")
    assert ended.status == 2
    assert "train.shuffle_rewards: saved False, now True" in ended.err and "seed: saved 0, now 1" in ended.err
    assert "train.steps" not in ended.err and "--fresh" in ended.err
    assert timeless(run) == timeless(finished.folder)

    ended = command(*other, "--fresh")
    assert ended.status == 0, ended.err
    (moved,) = tmp_path.glob("run.old-*")
    assert str(moved) in ended.out
    assert timeless(moved) == timeless(finished.folder) and steps_saved(moved) == [0, 4]
    assert steps_saved(run) == [0, 1]
    # Shuffled: the same completions and rewards, other advantages, of which there are as many of each.
    first = [json.loads(line) for line in (moved / "completions.jsonl").read_text().splitlines()[:32]]
    shuffled = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    without = [{k: v for k, v in record.items() if k != "advantage"} for record in first]
    assert [{k: v for k, v in record.items() if k != "advantage"} for record in shuffled] == without
    assert [r["advantage"] for r in shuffled] != [r["advantage"] for r in first]
    assert timeless(run)[0]["Training/RewardMean"] == timeless(moved)[0]["Training/RewardMean"]


def test_a_workdir_whose_set_up_failed_can_be_used_again(finished: FinishedRun, tmp_path: Path) -> None:
    train = ("train", finished.experiment, "--workdir", tmp_path / "run", "--train.steps", "1")
    assert command(*train, "--rollout.num-prompts", "12").status == 2
    assert not (tmp_path / "run").exists()
    assert command(*train).status == 0


def test_a_refused_command_leaves_the_folder_as_it_was(
    finished: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished.copy(tmp_path / "run")
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    train = ("train", finished.experiment, "--workdir", run)
    assert command(*train, "--eval.batch-size", "12").status == 2
    assert command(*train, "--fresh", "--rollout.num-prompts", "12").status == 2
    monkeypatch.chdir(run)
    ended = command(*train, "--fresh")
    assert ended.status == 2 and "run it from elsewhere" in ended.err
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before
    assert list(tmp_path.iterdir()) == [run]


def test_a_folder_without_a_run_is_never_set_aside(finished: FinishedRun, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    ended = command("train", finished.experiment, "--workdir", tmp_path, "--fresh")
    assert ended.status == 2 and "is not empty and holds no run" in ended.err
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


# Other commands on a run


def test_eval_writes_its_report(finished: FinishedRun, tmp_path: Path) -> None:
    reports = []
    for name, run in (("run", finished.folder), ("step", finished.folder / "checkpoints" / "0")):
        ended = command("eval", run, "--json", tmp_path / f"{name}.json")
        assert ended.status == 0 and "greedy accuracy" in ended.out, ended.err
        reports.append(json.loads((tmp_path / f"{name}.json").read_text()))
    for report in reports:
        names = ("greedy_accuracy", "success_rate", "pass@1", "pass@4", "maj@4")
        assert set(report) == {
            *names, *(f"{name}_ci" for name in names),
            "num_problems", "samples", "temperature", "mean_length", "truncated_share",
        }  # fmt: skip
        assert (report["num_problems"], report["samples"], report["temperature"]) == (8, 4, 1.0)
    # The reward is the length: training has made completions longer.
    assert reports[0]["mean_length"] > reports[1]["mean_length"]


def test_sample(finished: FinishedRun) -> None:
    ended = command("sample", finished.folder, "--prompt", "385102>", "--samples", "4")
    assert ended.status == 0, ended.err
    assert [line[:7] for line in ended.out.splitlines() if line.startswith("--- ")] == [
        f"--- {n}/4" for n in (1, 2, 3, 4)
    ]


# Variants


def test_learning_rate_0_leaves_the_weights(finished: FinishedRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = command(
        "train", finished.experiment, "--workdir", run, "--train.steps", "1", "--optimizer.learning-rate", "0"
    )
    assert ended.status == 0, ended.err
    (record,) = read_metrics(run / "metrics.jsonl")
    assert record["Training/GradNorm"] > 0 and record["Training/UpdateNorm"] == 0
    assert_equal_weights(weights(run, 0), weights(run, 1))


def test_several_updates_micro_batches_and_a_synced_reference_on_a_split_mesh(
    finished: FinishedRun, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ended = command(
        "train", finished.experiment, "--workdir", run, "--train.steps", "2",
        "--train.updates-per-batch", "2", "--train.prompt-micro-batches", "2", "--train.group-micro-batches", "2",
        "--objective.beta", "0.1", "--reference.update", "sync", "--reference.sync-every", "2",
        "--mesh.data", "2", "--mesh.group", "2", "--mesh.tensor", "2",
    )  # fmt: skip
    assert ended.status == 0, ended.err
    first, second = read_metrics(run / "metrics.jsonl")
    # The draws depend on neither the mesh nor the loss: the first rollout is the shared run's.
    shared = (finished.folder / "completions.jsonl").read_text().splitlines()[:32]
    assert [json.loads(line)["completion"] for line in shared] == [
        json.loads(line)["completion"] for line in (run / "completions.jsonl").read_text().splitlines()[:32]
    ]
    for record in (first, second):
        # Were a completion trained on with another prompt or in another order, these would be far apart.
        assert record["Policy/SamplerGapMax"] < 1e-4
        assert record["Training/RewardFailures/belongs"] == 0
        # The second update of a batch is off its old policy.
        assert record["Policy/RatioMax"] > 1.001 and record["Policy/RatioMin"] < 0.999
        assert record["Training/KLLoss"] > 0
    assert second["Policy/KL"] > first["Policy/KL"] > 0  # the reference has not moved yet
    saved = {step: state(finished, run, step) for step in (0, 2)}
    for step in (0, 2):  # as at the start, and as it was synced after step 2
        for policy, reference in zip(
            jax.tree.leaves(saved[step].params), jax.tree.leaves(saved[step].ref_params), strict=True
        ):
            np.testing.assert_array_equal(policy, reference)
    assert int(saved[2].step) == 2


def state(finished: FinishedRun, run: Path, step: int) -> TrainState:
    config = config_from_dict(json.loads((run / "config.json").read_text()))
    task = load_experiment(finished.experiment).make_task(config)
    checkpoints = Checkpointer(run / "checkpoints", keep=1, keep_best=0)
    restored, host = checkpoints.restore(Session(build_policy(config, task)).abstract_state(), step)
    assert checkpoints.saved_config(step) == config_to_dict(config)
    assert host["prompts"]["next_batch"] == step
    checkpoints.close()
    return restored


def test_task_settings_apply_to_an_experiments_own_task(finished: FinishedRun) -> None:
    experiment = load_experiment(finished.experiment)
    task = dataclasses.replace(experiment.config.task, num_train=16, reward_weights=(1.0, 2.0, 3.0, 4.0))
    config = dataclasses.replace(experiment.config, task=task)
    policy = build_policy(config, experiment.make_task(config))
    assert len(policy.task.train) == 16
    assert [reward.weight for reward in policy.task.rewards] == [1.0, 2.0, 3.0, 4.0]
