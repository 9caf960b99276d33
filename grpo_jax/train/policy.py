"""Loading the policy of a run, for evaluation and sampling."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path

import jax

from grpo_jax.checkpoint import Checkpointer, CheckpointError
from grpo_jax.config import Config, config_from_dict
from grpo_jax.tasks.base import Task
from grpo_jax.train.session import Policy, build_policy

CONFIG_FILE = "config.json"
CHECKPOINT_FOLDER = "checkpoints"


def load_policy(run: Path, *, checkpoint: str = "latest", task: Task | None = None) -> Policy:
    """The policy that a run has saved.

    Args:
        run: the run's folder, its ``checkpoints`` folder, or one checkpoint in it.
        checkpoint: ``latest``, ``best`` (by held-out success rate) or a step; a checkpoint that ``run``
            names goes before.
        task: replaces the task of the run's configuration; needed where that is "custom".

    Raises:
        FileNotFoundError: there is no such run.
        CheckpointError: it has no such checkpoint, or the checkpoint is broken.
    """
    folder, step = _resolve(run)
    config = read_config(run)
    checkpoints = Checkpointer(folder / CHECKPOINT_FOLDER, keep=1, keep_best=0)
    with contextlib.closing(checkpoints):
        if step is None and checkpoint == "best":
            step = checkpoints.best_step()
            if step is None:
                raise CheckpointError(
                    f"{folder} has no best checkpoint: none was evaluated on held-out problems; use 'latest'"
                )
        elif step is None and checkpoint != "latest":
            step = int(checkpoint)
        if checkpoints.latest_step() is None:
            raise CheckpointError(f"{folder / CHECKPOINT_FOLDER} holds no checkpoint: has the run saved one yet?")
        policy = build_policy(config, task)
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), policy.params
        )
        return dataclasses.replace(policy, params=checkpoints.restore_params(step, abstract))


def read_config(run: Path) -> Config:
    """The configuration of a run.

    Raises:
        FileNotFoundError: the folder is missing or holds no run.
        ValueError: its config.json cannot be read.
    """
    folder, _ = _resolve(run)
    file = folder / CONFIG_FILE
    try:
        return config_from_dict(json.loads(file.read_text()))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error


def _resolve(run: Path) -> tuple[Path, int | None]:
    """The run's folder, and the step if ``run`` is one checkpoint."""
    run = Path(run)
    if not run.is_dir():
        raise FileNotFoundError(f"there is no run folder {run}")
    candidates = (
        (run, None),
        (run.parent, None) if run.name == CHECKPOINT_FOLDER else None,
        (run.parent.parent, int(run.name)) if run.name.isdecimal() else None,
    )
    for candidate in candidates:
        if candidate is not None and (candidate[0] / CONFIG_FILE).is_file():
            return candidate
    raise FileNotFoundError(f"{run} holds no run: it has no {CONFIG_FILE}")
