"""What goes wrong is said in one message with the remedy, before work is lost, and without a traceback."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import transformers

from grpo_jax.checkpoint import Checkpointer, CheckpointError
from grpo_jax.cli.experiment import load_experiment
from grpo_jax.console import Console
from grpo_jax.metrics import read_metrics
from grpo_jax.models.config import DecoderConfig
from grpo_jax.models.decoder import init_params
from grpo_jax.models.hf import save_hf
from grpo_jax.train.loop import announce
from grpo_jax.train.session import Session, build_policy
from tests.train.conftest import FinishedRun, command


def assert_refused(status: int, error: str, *expected: str) -> None:
    assert status == 2
    # What an option's own section refuses is shown in a frame, which breaks lines.
    error = " ".join(re.sub(r"[│╭╮╰╯─]|\x1b\[[0-9;]*m", " ", error).split())
    for part in expected:
        assert part in error, error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--rollout.group-size 1", ["rollout.group_size must be at least 2", "got 1"]),
        ("--rollout.temperature 0", ["rollout.temperature must be above 0 in training, got 0"]),
        (
            "--train.prompt-micro-batches 3",
            ["train.prompt_micro_batches (3) must divide rollout.num_prompts (8)", "nearest that do: 2 and 4"],
        ),
        ("--train.group-micro-batches 3", ["train.group_micro_batches (3) must divide rollout.group_size (4)"]),
        ("--rollout.num-slots 6", ["rollout.num_slots (6) must make equal rows on each", "at most 4 slots"]),
        (
            "--rollout.num-slots 4",
            ["rollout.num_slots (4)", "mesh.data * mesh.fsdp (8)", "example 32"],
        ),
        (
            "--rollout.num-prompts 12",
            ["rollout.num_prompts (12) must be a multiple of", "the nearest that work: 8 and 16"],
        ),
        (
            "--train.prompt-micro-batches 2",
            ["rollout.num_prompts (8)", "= 16", "the nearest that work: 16"],
        ),
        ("--eval.batch-size 12", ["eval.batch_size (12)", "8 and 16"]),
        ("--mesh.data 3", ["mesh (data=3, fsdp=1, group=1, tensor=1) does not fit 8 devices"]),
        ("--mesh.tensor 8", ["parameter", "cannot be split", "choose a smaller mesh.tensor or mesh.fsdp"]),
        ("--rollout.max-prompt-length 6", ["64 of 64 train prompts", "(6)", "has 7 tokens", "long_prompts=drop"]),
        (
            "--rollout.num-prompts 128",
            ["num_prompts must be between 1 and the", "problems (64), got 128"],
        ),
        ("--task.num-train 65", ["task.num_train must be between 1 and the 64", "got 65"]),
        ("--model.attention splash", ["model.attention='splash' needs a TPU, got the backend 'cpu'"]),
        ("--task.name srot", ["task.name must be one of", "'srot'", "did you mean 'sort'?"]),
        ("--task.name jsonl", ["task.path must name a file"]),
        ("--warm-start.steps 2", ["warm_start.batch_size (128)", "at most the number of demonstrations", "(64)"]),
        (
            "--warm-start.steps 2 --warm-start.batch-size 8 --rollout.max-completion-length 6",
            ["a demonstration has 7 tokens, more than rollout.max_completion_length (6)"],
        ),
    ],
)
def test_configs_that_cannot_run(
    finished: FinishedRun, tmp_path: Path, arguments: str, expected: list[str]
) -> None:
    run = tmp_path / "run"
    ended = command("train", finished.experiment, "--workdir", run, *arguments.split())
    assert_refused(ended.status, ended.err, *expected)
    assert not (run / "checkpoints").exists() and not (run / "metrics.jsonl").exists()


def test_a_run_with_another_devices_kernel_can_still_be_evaluated(finished: FinishedRun, tmp_path: Path) -> None:
    run = finished.copy(tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["model"] |= {"attention": "splash"}
    (run / "config.json").write_text(json.dumps(config))
    ended = command("eval", run, "--num-problems", "8", "--samples", "1")
    assert ended.status == 0, ended.err


def test_misspelt_field_in_the_experiment(tmp_path: Path) -> None:
    experiment = tmp_path / "typo.py"
    experiment.write_text("import grpo_jax.config as c\nget_config = lambda: c.RolloutConfig(groupsize=4)\n")
    ended = command("train", experiment, "--workdir", tmp_path / "run")
    assert_refused(ended.status, ended.err, "typo.py:2", "RolloutConfig", "'groupsize'")


def test_malformed_line_of_a_task_file(finished: FinishedRun, tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"\n')
    arguments = ("--task.name", "jsonl", "--task.path", problems)
    ended = command("train", finished.experiment, "--workdir", tmp_path / "run", *arguments)
    assert_refused(ended.status, ended.err, f"{problems}, line 2: not valid JSON")
    problems.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n')
    ended = command("train", finished.experiment, "--workdir", tmp_path / "run", *arguments)
    assert_refused(ended.status, ended.err, "model.path must name a checkpoint", "no tokenizer")


def test_long_prompts_can_be_dropped_and_are_counted(finished: FinishedRun) -> None:
    experiment = load_experiment(finished.experiment)
    task = experiment.make_task(experiment.config)
    assert task is not None
    longer = [dataclasses.replace(e, prompt=f"00{e.prompt}") for e in task.train[:3]]
    task = dataclasses.replace(task, train=[*longer, *task.train[3:]])
    with pytest.raises(ValueError, match=r"3 of 64 train prompts .* \(8\), the longest has 9 tokens"):
        build_policy(experiment.config, task)
    config = dataclasses.replace(
        experiment.config, task=dataclasses.replace(experiment.config.task, long_prompts="drop")
    )
    policy = build_policy(config, task)
    assert list(policy.task.train) == list(task.train[3:]) and len(policy.task.heldout) == 8
    out = io.StringIO()
    with Console(file=out) as console:
        announce(Session(policy), Path("runs/x"), console)
    assert "warning: 3 prompts are longer than rollout.max_prompt_length (8) and were left out" in out.getvalue()


def test_tokenizer_without_an_end_of_sequence(finished: FinishedRun, tmp_path: Path) -> None:
    letters = {letter: i for i, letter in enumerate("0123456789>")}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters, merges=[]))
    checkpoint = tmp_path / "checkpoint"
    decoder = DecoderConfig.from_model_config(load_experiment(finished.experiment).config.model, len(letters))
    save_hf(checkpoint, decoder, jax.tree.map(np.asarray, init_params(decoder, jax.random.key(0))))
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(checkpoint)
    ended = command("train", finished.experiment, "--workdir", tmp_path / "run", "--model.path", checkpoint)
    assert_refused(ended.status, ended.err, str(checkpoint), "no id that ends a completion", "eos_token_id")


def test_warm_start_without_demonstrations(finished: FinishedRun, tmp_path: Path) -> None:
    experiment = tmp_path / "plain.py"
    experiment.write_text(
        finished.experiment.read_text().replace(
            "train=task.train[:64]",
            "train=[dataclasses.replace(e, demonstration=None) for e in task.train]",
        )
    )
    ended = command("train", experiment, "--workdir", tmp_path / "run", "--warm-start.steps", "2")
    assert_refused(ended.status, ended.err, "warm_start.steps is 2", "no demonstrations", "warm_start.steps to 0")


# Folders


def test_workdir_that_is_a_file_or_someone_elses(finished: FinishedRun, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    ended = command("train", finished.experiment, "--workdir", file)
    assert_refused(ended.status, ended.err, str(file), "is a file", "name a folder")
    assert file.read_text() == "mine"
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    ended = command("train", finished.experiment, "--workdir", folder)
    assert_refused(ended.status, ended.err, str(folder), "is not empty and holds no run")
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]


def test_missing_runs_and_checkpoints(finished: FinishedRun, tmp_path: Path) -> None:
    run = finished.copy(tmp_path / "run")
    for name in ("eval", "sample"):
        extra = ("--prompt", "385102>") if name == "sample" else ()
        ended = command(name, tmp_path / "none", *extra)
        assert_refused(ended.status, ended.err, f"there is no run folder {tmp_path / 'none'}")
        ended = command(name, tmp_path, *extra)
        assert_refused(ended.status, ended.err, f"{tmp_path} holds no run", "config.json")
        ended = command(name, run, "--checkpoint", "3", *extra)
        assert_refused(ended.status, ended.err, "no checkpoint of step 3", "steps 0, 4")
    shutil.rmtree(run / "checkpoints")
    ended = command("eval", run)
    assert_refused(ended.status, ended.err, str(run / "checkpoints"), "holds no checkpoint")


def test_broken_checkpoint(finished: FinishedRun, tmp_path: Path) -> None:
    run = finished.copy(tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "4" / "policy")
    broken = (str(run / "checkpoints" / "4"), "cannot be read", "step 0")
    ended = command("eval", run)
    assert_refused(ended.status, ended.err, *broken)
    ended = command("train", finished.experiment, "--workdir", run, "--train.steps", "5")
    assert_refused(ended.status, ended.err, *broken)
    # Nothing was touched.
    assert len(read_metrics(run / "metrics.jsonl")) == 4
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["0", "4"]
    assert command("eval", run, "--checkpoint", "0").status == 0


# In the middle of a run


def test_full_disk_in_a_save(finished: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Checkpointer.save

    def full_at_2(self: Checkpointer, step: int, *args: Any, **kwargs: Any) -> None:
        if step == 2:
            raise CheckpointError(f"could not save step 2 to {self.folder}: no space left")
        save(self, step, *args, **kwargs)

    run = tmp_path / "run"
    train = ("train", finished.experiment, "--workdir", run, "--checkpoint.every", "1")
    monkeypatch.setattr(Checkpointer, "save", full_at_2)
    ended = command(*train)
    assert_refused(ended.status, ended.err, "could not save step 2", "no space left")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["0", "1"]
    monkeypatch.setattr(Checkpointer, "save", save)
    ended = command(*train)
    assert ended.status == 0 and "going on from the checkpoint of step 1" in ended.out
    completions = (run / "completions.jsonl").read_text()
    assert completions == (finished.folder / "completions.jsonl").read_text()


def test_gradients_that_stay_nan_stop_the_run(
    finished: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_batch = Session.make_batch

    steps = itertools.count(1)

    def spoiled_from_3(self: Session, *args: Any) -> Any:
        batch, rewards_PG, metrics = make_batch(self, *args)
        if next(steps) >= 3:
            batch = batch.replace(advantages_PG=batch.advantages_PG * jnp.nan)
        return batch, rewards_PG, metrics

    monkeypatch.setattr(Session, "make_batch", spoiled_from_3)
    run = tmp_path / "run"
    train = ("train", finished.experiment, "--workdir", run, "--checkpoint.every", "2", "--train.steps", "9")
    ended = command(*train, "--optimizer.max-nonfinite", "2")
    assert ended.status == 1
    # Steps 3 and 4 were let pass, the third in a row was not.
    for part in ("step 5", "NaN or infinite in 3 updates in a row", "loss nan", "learning_rate"):
        assert part in ended.err
    assert "Traceback" not in ended.err
    records = read_metrics(run / "metrics.jsonl")
    assert [record["Training/NonFiniteSkipped"] for record in records] == [0, 0, 1, 2]
    assert records[3]["Training/Loss"] is None  # NaN in JSON
    # Skipped updates leave the weights as they were: every checkpoint is a good one.
    checkpoints = Checkpointer(run / "checkpoints", keep=1, keep_best=0)
    assert checkpoints.steps() == [0, 2, 4]  # the first is the best so far
    for a, b in zip(*(jax.tree.leaves(checkpoints.restore_params(step)) for step in (2, 4)), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b)
    checkpoints.close()
