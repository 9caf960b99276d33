"""The dry run compiles what the run compiles, says what it takes, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from grpo_jax.cli.experiment import Experiment, load_experiment
from grpo_jax.cli.tables import print_dry_run
from grpo_jax.config import Config
from grpo_jax.models.config import DecoderConfig
from grpo_jax.models.flops import BatchSizes, forward_flops, update_flops
from grpo_jax.rewards import RewardResult
from grpo_jax.train.dry_run import DryRun, Stage, dry_run
from grpo_jax.train.session import Session, build_policy
from tests.train.conftest import EXPERIMENT, command

SIZES = BatchSizes(prompts=8, group=4, prompt=8, completion=8)


def change(config: Config, **sections: dict[str, Any]) -> Config:
    changed = {name: dataclasses.replace(getattr(config, name), **fields) for name, fields in sections.items()}
    return dataclasses.replace(config, **changed)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    path = tmp_path_factory.mktemp("dry") / "tiny.py"
    path.write_text(EXPERIMENT)
    return load_experiment(path)


@pytest.fixture(scope="module")
def rich_config(experiment: Experiment) -> Config:
    """With a reference, old log-probabilities, replaced groups, refilled slots, and an odd last batch to judge."""
    return change(
        experiment.config,
        objective={"beta": 0.01},
        train={"updates_per_batch": 2},
        rollout={"extra_rollouts": 1, "num_slots": 32 // 4 * 2},
        eval={"num_problems": 8, "batch_size": 8, "samples": 3},
    )


@pytest.fixture(scope="module")
def plain(experiment: Experiment) -> DryRun:
    """Of the experiment as it is."""
    return dry_run(experiment.config, task=experiment.make_task(experiment.config))


@pytest.fixture(scope="module")
def rich(experiment: Experiment, rich_config: Config) -> DryRun:
    return dry_run(rich_config, task=experiment.make_task(rich_config))


def calls(run: DryRun) -> list[list[str]]:
    """What each program is called for."""
    return [[work.name for work in stage.works] for stage in run.stages]


def stage_of(run: DryRun, name: str) -> Stage:
    (stage,) = (stage for stage in run.stages if stage.works[0].name == name)
    return stage


def decoder(experiment: Experiment) -> DecoderConfig:
    task = experiment.make_task(experiment.config)
    assert task is not None and task.tokenizer is not None
    return DecoderConfig.from_model_config(experiment.config.model, task.tokenizer.vocab_size)


def test_stages_are_those_that_the_configuration_asks_for(plain: DryRun, rich: DryRun) -> None:
    # One program samples for training and for the evaluation where the shapes are equal.
    assert calls(plain) == [["rollout", "evaluation, samples"], ["batch"], ["update"], ["evaluation, greedy"]]
    assert calls(rich) == [
        ["rollout"],
        ["replacing groups"],
        ["log-probabilities", "log-probabilities"],
        ["batch"],
        ["update"],
        ["evaluation, greedy"],
        ["evaluation, samples"],
    ]
    assert stage_of(rich, "rollout").works[0].slots == (8, 2)
    assert stage_of(plain, "rollout").works[0].slots == (8, 4)
    assert stage_of(rich, "evaluation, samples").works[0].slots == (8, 3)
    assert all(stage.program.seconds > 0 for stage in rich.stages)


def test_a_batch_sampled_in_parts_is_compiled_for_a_part(experiment: Experiment) -> None:
    config = change(experiment.config, rollout={"num_prompts": 16, "overlap": True, "overlap_parts": 2})
    run = dry_run(config, task=experiment.make_task(config))
    assert calls(run)[:2] == [["rollout, each of 2 parts"], ["joining parts"]]
    rollout, joining = (run.stages[i] for i in range(2))
    assert rollout.works[0].sizes.prompts == 8 and rollout.works[0].slots == (8, 4)
    assert rollout.program.compiled.out_info.completion_PGT.shape == (8, 4, 8)
    assert joining.program.compiled.out_info.completion_PGT.shape == (16, 4, 8)


def test_shapes_are_those_of_a_real_step(experiment: Experiment, rich_config: Config, rich: DryRun) -> None:
    outputs: list[Any] = []

    def recording_jit(function: Any, **options: Any) -> Any:
        compiled = jax.jit(function, **options)

        def call(*arguments: Any, **keywords: Any) -> Any:
            output = compiled(*arguments, **keywords)
            outputs.append(jax.tree.map(lambda x: (x.shape, x.dtype), output))
            return output

        return call

    policy = build_policy(rich_config, experiment.make_task(rich_config), jit=recording_jit)
    session = Session(policy, jit=recording_jit)
    state, key = session.initial_state(policy.params), jax.random.key(0)
    rollout = session.roll_out(state.params, next(session.prompts), key)
    old, ref = session.score(rollout, state)
    rewards = RewardResult(np.zeros((8, 4, len(session.reward_names)), np.float32), {})
    batch, *_ = session.make_batch(rollout, rewards, np.zeros((8, 4), bool), old, ref, key)
    session.update(state, batch)

    names = ("rollout", "log-probabilities", "log-probabilities", "batch", "update")
    assert len(outputs) == len(names)
    for name, output in zip(names, outputs, strict=True):
        expected = stage_of(rich, name).program.compiled.out_info
        assert output == jax.tree.map(lambda x: (x.shape, x.dtype), expected), name


def test_arithmetic_is_what_the_sizes_need(plain: DryRun, rich: DryRun, experiment: Experiment) -> None:
    model = decoder(experiment)
    for run, updates in ((plain, 1), (rich, 2)):
        assert stage_of(run, "rollout").works[0].sizes == SIZES
        assert stage_of(run, "rollout").works[0].flops == forward_flops(model, SIZES)
        assert stage_of(run, "update").works[0].flops == updates * update_flops(model, SIZES)
    greedy = stage_of(plain, "evaluation, greedy").works[0]
    assert greedy.flops == forward_flops(model, dataclasses.replace(SIZES, group=1))


def test_memory_of_the_state(plain: DryRun, rich: DryRun) -> None:
    assert plain.num_devices == 8
    assert plain.params == 4 * plain.num_params
    assert plain.reference == 0 and rich.reference == rich.params
    # Two moments and a few counters.
    assert 0 <= plain.optimizer - 2 * plain.params < 100
    for run in (plain, rich):
        update = stage_of(run, "update")
        state = run.params + run.optimizer + run.reference
        # The update takes the whole state and gives it back in its place.
        assert update.program.arguments == pytest.approx(state + update.inputs, rel=0.01)
        assert update.program.donated == pytest.approx(state, rel=0.01)
        assert run.peak(update) == state + update.inputs + update.program.added
        assert run.peak(update) >= update.program.arguments + update.program.temporaries
        # Sampling takes the parameters, and the rest of the state stays where it is.
        rollout = stage_of(run, "rollout")
        assert rollout.program.arguments == pytest.approx(run.params + rollout.inputs, rel=0.01)
        assert run.peak(rollout) > state + rollout.program.temporaries


def test_memory_is_that_of_one_device(experiment: Experiment, plain: DryRun) -> None:
    config = change(experiment.config, mesh={"data": 1, "fsdp": 8})
    split = dry_run(config, task=experiment.make_task(config))
    assert split.num_params == plain.num_params
    assert split.params < plain.params / 4
    assert stage_of(split, "update").program.arguments < stage_of(plain, "update").program.arguments / 4
    assert stage_of(split, "update").inputs == stage_of(plain, "update").inputs


def test_a_last_batch_of_another_size_is_compiled_too(experiment: Experiment) -> None:
    config = change(experiment.config, eval={"num_problems": 24, "batch_size": 16, "samples": 4})
    task = experiment.make_task(config)
    assert task is not None
    task = dataclasses.replace(task, heldout=task.heldout * 3)
    run = dry_run(config, task=task)
    rows = [work.sizes.prompts for stage in run.stages for work in stage.works if work.name.endswith("greedy")]
    assert rows == [16, 8]


def test_the_command_prints_and_writes_nothing(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Session, "reward", lambda *_: pytest.fail("a reward function was called"))
    ended = command("train", experiment.path, "--dry-run", "--workdir", tmp_path / "run")
    assert ended.status == 0, ended
    for part in ("rollout", "update", "P 8 G 4 S 8 T 8", "slots 8 x 4", "state:", "peak:", "optimizer"):
        assert part in ended.out
    assert list(tmp_path.iterdir()) == []


def test_mistakes_are_found(experiment: Experiment) -> None:
    ended = command("train", experiment.path, "--dry-run", "--rollout.num-prompts", "9")
    assert ended.status == 2 and "rollout.num_prompts (9) must be a multiple" in ended.err


@pytest.mark.parametrize(("factor", "fits"), [(2.0, True), (0.5, False)])
def test_the_peak_is_held_against_the_device(
    plain: DryRun, capsys: pytest.CaptureFixture[str], factor: float, fits: bool
) -> None:
    peak = max(plain.peak(stage) for stage in plain.stages)
    print_dry_run(dataclasses.replace(plain, capacity=int(peak * factor)), title="x")
    out = capsys.readouterr().out
    assert f"{100 / factor:.1f} % of the device's" in out
    assert ("DOES NOT FIT" in out) is not fits
