"""One small run that most tests of this folder look at, and the tools to make others that compile little."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from grpo_jax.cli import main

EXPERIMENT = '''
import dataclasses
import os
import signal

from grpo_jax.config import (
    Config, EvalConfig, LogConfig, ModelConfig, ObjectiveConfig, OptimizerConfig, RolloutConfig, TrainConfig,
)

calls = 0


def length(*, completions, **columns):
    """Rewards that differ within each group; in the call that $SIGINT_IN_CALL names it sends $SIGINTS signals."""
    global calls
    calls += 1
    if str(calls) == os.environ.get("SIGINT_IN_CALL"):
        # Two of one kind would be one, where another thread than the main one sends them.
        for number in (signal.SIGINT, signal.SIGTERM)[: int(os.environ["SIGINTS"])]:
            os.kill(os.getpid(), number)
    return [len(text) / 8 for text in completions]


def belongs(*, prompts, completions, completion_ids, answer):
    """1 where all that describes a completion fits together, else it raises."""
    for prompt, text, ids, right in zip(prompts, completions, completion_ids, answer, strict=True):
        assert right == "".join(sorted(prompt[:-1]))
        assert text == "".join("0123456789>x"[i - 2] for i in ids if i > 1)
    return [1.0] * len(prompts)


def picky(*, completions, **columns):
    """None for an empty completion; raises on one with a 9."""
    for text in completions:
        if "9" in text:
            raise RuntimeError("no nines")
    return [None if text == "" else 0.25 for text in completions]


def get_task(config):
    from grpo_jax.rewards import Reward
    from grpo_jax.tasks.sort import sort_digits
    from grpo_jax.tokenizer import CharTokenizer

    task = sort_digits(config.task, config.seed)
    rewards = (*task.rewards, Reward("length", length), Reward("belongs", belongs, 0.0), Reward("picky", picky))
    # One letter more than the task needs makes a vocabulary that two devices can share.
    return dataclasses.replace(
        task,
        train=task.train[:64],
        heldout=task.heldout[:8],
        rewards=rewards,
        tokenizer=CharTokenizer("0123456789>x"),
    )


def get_config():
    return Config(
        experiment="tiny",
        model=ModelConfig(num_layers=1, width=16, ffn_width=16, num_heads=2, num_kv_heads=2),
        rollout=RolloutConfig(num_prompts=8, group_size=4, max_prompt_length=8, max_completion_length=8),
        objective=ObjectiveConfig(entropy_coef=0.01),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        train=TrainConfig(steps=4),
        # The samples of a problem as many as a group's completions: one compiled program for both.
        eval=EvalConfig(num_problems=8, samples=4, batch_size=8),
        log=LogConfig(table_every=2, completions_per_step=32),
    )
'''


@dataclass(frozen=True)
class Ended:
    """A command that has come to its end."""

    status: int
    out: str
    err: str


def command(*arguments: str | Path) -> Ended:
    """Run the command line in this process, its output going into a pipe."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as stop:  # the parser's own end
            assert isinstance(stop.code, int)
            status = stop.code
    return Ended(status, out.getvalue(), err.getvalue())


@dataclass(frozen=True)
class FinishedRun:
    """A run of four steps."""

    experiment: Path
    folder: Path
    ended: Ended

    def copy(self, folder: Path) -> Path:
        """The run's folder once more, to be changed."""
        return shutil.copytree(self.folder, folder)


@pytest.fixture(scope="session")
def compile_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each run builds its own compiled functions; those that are equal are taken from a cache."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    compilation_cache.reset_cache()
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def finished(compile_once: None, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The run that tests share; none may change its folder."""
    assert "SIGINT_IN_CALL" not in os.environ
    root = tmp_path_factory.mktemp("finished")
    experiment = root / "tiny.py"
    experiment.write_text(EXPERIMENT)
    ended = command("train", experiment, "--workdir", root / "run")
    assert ended.status == 0, ended
    return FinishedRun(experiment, root / "run", ended)
