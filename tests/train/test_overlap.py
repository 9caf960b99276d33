"""Rewards beside sampling: a batch in parts, a step ahead, the time that it takes, and the thread's end."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.config import (
    Config,
    EvalConfig,
    LogConfig,
    MeshConfig,
    ModelConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
)
from grpo_jax.mesh import make_mesh
from grpo_jax.metrics import read_metrics
from grpo_jax.rewards import Reward
from grpo_jax.rollout.sampler import Sampler
from grpo_jax.tasks import make_task
from grpo_jax.tasks.base import Task
from grpo_jax.train import session as sessions
from grpo_jax.train.loop import train
from grpo_jax.train.overlap import RewardThread
from tests.train.conftest import Ended, FinishedRun, command
from tests.train.test_loop import assert_equal_weights, steps_saved, timeless, weights

MESH = ("--mesh.data", "2", "--mesh.group", "2", "--mesh.tensor", "2")


def reward_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rewards"]


def completions(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


# A batch in parts


@pytest.mark.slow
@pytest.mark.parametrize("slots", [(), ("--rollout.num-slots", "8")])
def test_parts_of_a_batch_are_the_whole_one(finished: FinishedRun, tmp_path: Path, slots: tuple[str, ...]) -> None:
    """The run that all tests share has other meshes' last bits, and no parts."""
    run = tmp_path / "run"
    ended = command(
        *("train", finished.experiment, "--workdir", run, "--train.steps", "2", *MESH, *slots),
        *("--rollout.overlap", "--rollout.overlap-parts", "2"),
    )
    assert ended.status == 0, ended.err
    assert reward_threads() == []
    expected = [record for record in completions(finished.folder) if record["step"] <= 2]
    for record, other in zip(completions(run), expected, strict=True):
        assert record.pop("advantage") == pytest.approx(other.pop("advantage"), abs=1e-5)
        assert record == other
    ours, theirs = timeless(run), timeless(finished.folder)
    for one, several in zip(theirs[:2], ours, strict=True):
        for name in one:  # a run evaluates after its last step
            assert several[name] == pytest.approx(one[name], abs=2e-5), name
        # Tokens that were trained on beside another prompt's would be far off.
        assert several["Policy/SamplerGapMax"] < 1e-4


# A step ahead


AHEAD = ("--rollout.steps-ahead", "1", "--rollout.extra-rollouts", "1")


@pytest.fixture(scope="module")
def ahead(finished: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """Four steps that each train on samples of the policy before the last update."""
    run = tmp_path_factory.mktemp("ahead") / "run"
    ended = command("train", finished.experiment, "--workdir", run, *AHEAD)
    assert ended.status == 0, ended.err
    assert reward_threads() == []
    return run, ended


@pytest.mark.slow
def test_samples_are_an_update_behind_and_weighted(
    finished: FinishedRun, ahead: tuple[Path, Ended], tmp_path: Path
) -> None:
    run, ended = ahead
    said = "samples with the policy from before the last update: samples are off-policy, corrected by importance"
    assert said in ended.out + ended.err
    first, *later = read_metrics(run / "metrics.jsonl")
    assert first["Policy/SamplerGapMax"] < 1e-4 and first["Policy/ImportanceMean"] == pytest.approx(1, abs=1e-4)
    for record in later:
        assert record["Policy/SamplerGapMax"] > 1e-3
        assert record["Training/RewardFailures/belongs"] == 0
    # The second batch is of the weights that the run began with, as is that of a run that learns nothing.
    still = ("train", finished.experiment, "--workdir", tmp_path / "still", "--optimizer.learning-rate", "0")
    one_ahead = (*still[:3], tmp_path / "ahead", "--train.steps", "2", "--rollout.steps-ahead", "1")
    assert command(*still, "--train.steps", "2").status == command(*one_ahead).status == 0
    texts = [[r["completion"] for r in completions(tmp_path / name)] for name in ("still", "ahead")]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_interrupted_killed_and_extended_runs_a_step_ahead_equal_an_uninterrupted_one(
    finished: FinishedRun, ahead: tuple[Path, Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Extra rollouts are drawn between a rollout ahead and its step: both their prompts must be found again."""
    whole, _ = ahead
    assert [record["Training/ExtraRollouts"] for record in timeless(whole)] == [1] * 4
    run = tmp_path / "run"
    options = ("train", finished.experiment, "--workdir", run, *AHEAD)
    # The third call of the rewards is the second step's first.
    monkeypatch.setenv("SIGINT_IN_CALL", "3")
    monkeypatch.setenv("SIGINTS", "1")
    ended = command(*options, "--train.steps", "3")
    assert ended.status == 130 and "stopped after step 2 of 3" in ended.out
    assert steps_saved(run) == [0, 2] and reward_threads() == []
    monkeypatch.setenv("SIGINTS", "2")
    ended = command(*options)
    assert ended.status == 130 and "Traceback" not in ended.err
    assert steps_saved(run) == [0, 2] and reward_threads() == []
    monkeypatch.delenv("SIGINT_IN_CALL")
    # Ends as a run of three steps, and is extended.
    assert command(*options, "--train.steps", "3").status == 0
    ended = command(*options)
    assert ended.status == 0 and "going on from the checkpoint of step 3" in ended.out
    got = timeless(run)
    got[2] = {name: value for name, value in got[2].items() if "HeldOut" not in name}
    assert got == timeless(whole)
    assert completions(run) == completions(whole)
    assert_equal_weights(weights(run, 4), weights(whole, 4))


@pytest.mark.slow
def test_a_step_ahead_resumes_to_the_same_end_on_a_split_mesh(finished: FinishedRun, tmp_path: Path) -> None:
    for name, stops in (("whole", ["2"]), ("halves", ["1", "2"])):
        for steps in stops:
            run = ("train", finished.experiment, "--workdir", tmp_path / name, "--train.steps", steps)
            ended = command(*run, *MESH, "--rollout.steps-ahead", "1", "--rollout.num-slots", "8")
            assert ended.status == 0, ended.err
    assert completions(tmp_path / "whole") == completions(tmp_path / "halves")
    assert_equal_weights(weights(tmp_path / "whole", 2), weights(tmp_path / "halves", 2))


# Time


P, G, PARTS, SECONDS = 4, 4, 4, 0.3


class SlowSampler(Sampler):
    """Sampling a batch of P prompts keeps the device busy for SECONDS."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        compiled = self.compiled

        def sleep(tokens: jax.Array, work: jax.Array) -> np.ndarray:
            time.sleep(SECONDS * len(tokens) / P)
            return np.asarray(tokens)

        @jax.jit
        def delayed(tokens: jax.Array) -> jax.Array:
            # XLA runs programs of a few operations in the thread that dispatches them.
            square = jnp.full((64, 64), tokens.sum(), jnp.float32)
            return jax.pure_callback(
                sleep, jax.ShapeDtypeStruct(tokens.shape, tokens.dtype), tokens, square @ square
            )

        def slow(**arguments: Any) -> Any:
            rollout = compiled(**arguments)
            return dataclasses.replace(rollout, completion_PGT=delayed(rollout.completion_PGT))

        self.compiled = slow


def slow_run(workdir: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[dict[str, Any]]:
    """Metrics of the steps of a run, whose rewards of a batch take SECONDS too, once all is compiled."""
    config = Config(
        model=ModelConfig(num_layers=1, width=16, ffn_width=16, num_heads=2, num_kv_heads=1),
        task=TaskConfig(name="sort", num_train=64, num_heldout=1),
        rollout=RolloutConfig(
            num_prompts=P, group_size=G, max_prompt_length=8, max_completion_length=4, **settings
        ),
        train=TrainConfig(steps=5),
        eval=EvalConfig(num_problems=1, batch_size=1, samples=1),
        log=LogConfig(table_every=0),
    )

    def slow(*, completions: list[str], **columns: Any) -> list[float]:
        time.sleep(SECONDS * len(completions) / (P * G))
        return [float(len(text)) for text in completions]

    # Callbacks want arrays that lie on one device.
    monkeypatch.setattr(sessions, "make_mesh", lambda config: make_mesh(config, jax.devices()[:1]))
    monkeypatch.setattr(sessions, "Sampler", SlowSampler)
    task = dataclasses.replace(make_task(config), rewards=(Reward("slow", slow),))
    train(config, workdir=workdir, task=task)
    assert reward_threads() == []
    return read_metrics(workdir / "metrics.jsonl")[2:]


def test_rewards_take_no_time_of_their_own(
    compile_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sleeps are never too short, so on a busy machine too the fastest step says what waits for what."""
    in_turn, parts, ahead = (
        slow_run(tmp_path / name, monkeypatch, **settings)
        for name, settings in {
            "in_turn": {},
            "parts": {"overlap": True, "overlap_parts": PARTS},
            "ahead": {"steps_ahead": 1},
        }.items()
    )

    def seconds(records: list[dict[str, Any]], name: str = "Step") -> list[float]:
        return [record[f"Performance/{name}Seconds"] for record in records]

    # One after the other would be 2, as it is in turn; (1 + 1 / PARTS) and 1 are what can be had.
    assert min(seconds(parts)) < 1.65 * SECONDS
    assert min(seconds(ahead)) < 1.5 * SECONDS
    assert np.mean(seconds(in_turn)) > 1.9 * SECONDS
    # What the reward functions took, and how much of it nothing was done beside.
    for records in (in_turn, parts, ahead):
        assert min(seconds(records, "RewardRun")) > SECONDS
        for record in records:
            assert 0 < record["Performance/RolloutWaitSeconds"] <= record["Performance/RolloutSeconds"]
            stages = ("Rollout", "Reward", "Score", "Update")
            total = sum(record[f"Performance/{stage}Seconds"] for stage in stages)
            assert record["Performance/StepSeconds"] == pytest.approx(total)
    assert max(seconds(in_turn, "RolloutWait")) > 0.8 * SECONDS
    assert min(seconds(in_turn, "RewardWait")) > SECONDS
    assert min(seconds(parts, "RewardWait")) < 0.7 * SECONDS
    assert min(seconds(ahead, "RewardWait")) < 0.5 * SECONDS


# The thread


def test_what_a_job_raises_is_raised_where_its_result_is_asked_for() -> None:
    def fails() -> Any:
        raise SystemExit("no reward")

    thread = RewardThread()
    futures = [thread.submit(fails), thread.submit(lambda: 3)]  # type: ignore[arg-type,return-value]
    with pytest.raises(SystemExit, match="no reward"):
        futures[0].result()
    assert futures[1].result() == 3
    thread.close()
    assert reward_threads() == []


def test_a_thread_ends_with_the_job_it_is_doing() -> None:
    thread = RewardThread()
    begun, may_end = threading.Event(), threading.Event()

    def job() -> Any:
        begun.set()
        may_end.wait(60)
        return "done"

    doing = thread.submit(job)
    never: Future[Any] = thread.submit(job)
    begun.wait(60)
    threading.Timer(0.1, may_end.set).start()
    thread.close()
    assert doing.result(0) == "done" and not never.done()
    assert reward_threads() == []


def tiny(reward: Callable[..., Any], **settings: Any) -> tuple[Config, Task]:
    config = Config(
        model=ModelConfig(num_layers=1, width=16, ffn_width=16, num_heads=2, num_kv_heads=1),
        task=TaskConfig(name="sort", num_train=64, num_heldout=4),
        rollout=RolloutConfig(
            num_prompts=8, group_size=4, max_prompt_length=8, max_completion_length=4, **settings
        ),
        eval=EvalConfig(num_problems=4, batch_size=4, samples=4),
        mesh=MeshConfig(data=4, group=2),
    )
    return config, dataclasses.replace(make_task(config), rewards=(Reward("own", reward),))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"overlap": True, "overlap_parts": 2}, {"steps_ahead": 1}])
def test_a_reward_that_breaks_its_contract_ends_the_run(
    compile_once: None, tmp_path: Path, settings: dict[str, Any]
) -> None:
    config, task = tiny(lambda **columns: [0.0], **settings)
    with pytest.raises(ValueError, match="'own' must return one reward a completion"):
        train(config, workdir=tmp_path / "run", task=task)
    assert reward_threads() == []


def test_a_second_signal_leaves_a_reward_that_hangs_behind(compile_once: None, tmp_path: Path) -> None:
    may_end = threading.Event()

    def hangs(**columns: Any) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        may_end.wait(60)

    config, task = tiny(hangs, steps_ahead=1)
    with pytest.raises(KeyboardInterrupt):
        train(config, workdir=tmp_path / "run", task=task)
    (left,) = reward_threads()
    assert left.daemon
    may_end.set()
    left.join()
