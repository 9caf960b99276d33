"""The folder of a run: opened anew, gone on with, or set aside; and the signal that asks a run to stop."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import jax
from jax.experimental import multihost_utils

from grpo_jax.config import Config, config_to_dict
from grpo_jax.config.resume import config_differences
from grpo_jax.train.policy import CHECKPOINT_FOLDER, CONFIG_FILE

EXPERIMENT_FILE = "experiment.py"


def check_run_folder(workdir: Path, config: Config, *, fresh: bool) -> Path | None:
    """Check, and change nothing, that a run can begin in a folder or go on there.

    Args:
        workdir: the folder.
        config: the run's configuration.
        fresh: an earlier run there is to be moved beside, to ``WORKDIR.old-TIME``.

    Returns:
        Where the earlier run is to be moved, or None.

    Raises:
        ValueError: the folder holds a run of another configuration, or is no folder of a run.
    """
    moved: Path | None = None
    file = workdir / CONFIG_FILE
    if workdir.exists() and not workdir.is_dir():
        raise ValueError(f"--workdir {workdir} is a file: name a folder")
    if workdir.is_dir() and any(workdir.iterdir()):
        if not file.is_file():
            raise ValueError(
                f"--workdir {workdir} is not empty and holds no run ({CONFIG_FILE} is missing): "
                "name another folder"
            )
        if fresh:
            if Path.cwd().is_relative_to(workdir.resolve()):
                raise ValueError(f"--fresh cannot move --workdir {workdir}, where it runs: run it from elsewhere")
            moved = workdir.with_name(f"{workdir.name}.old-{time.strftime('%Y%m%d-%H%M%S')}")
        elif (workdir / CHECKPOINT_FOLDER).is_dir():  # else the run failed before it had anything to lose
            _check_same_run(file, config, workdir)
    return moved


def open_run_folder(workdir: Path, config: Config, *, moved: Path | None, experiment_file: Path | None) -> None:
    """Make the folder of a run, or renew its configuration.

    Args:
        workdir: the folder, which :func:`check_run_folder` found in order.
        config: the run's configuration; written to ``config.json``.
        moved: where to move an earlier run, if anywhere.
        experiment_file: copied into the folder, so that a task of its own can be rebuilt.
    """
    experiment = None if experiment_file is None else experiment_file.read_text()
    _barrier("checked")
    if jax.process_index() == 0:
        if moved is not None:
            workdir.rename(moved)
        workdir.mkdir(parents=True, exist_ok=True)
        write_beside(workdir / CONFIG_FILE, json.dumps(config_to_dict(config), indent=1) + "\n")
        if experiment is not None:
            write_beside(workdir / EXPERIMENT_FILE, experiment)
    _barrier("opened")


def _check_same_run(file: Path, config: Config, workdir: Path) -> None:
    try:
        saved: dict[str, Any] = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not valid JSON ({error}): use --fresh to start over beside it") from error
    differences = config_differences(saved, config_to_dict(config))
    if differences:
        listed = "\n  ".join(differences)
        raise ValueError(
            f"--workdir {workdir} holds a run of another configuration:\n  {listed}\n"
            "Name another --workdir, or use --fresh to start over beside it."
        )


def write_beside(file: Path, text: str) -> None:
    """Write a file so that it is never seen half-written."""
    beside = file.with_name(file.name + ".tmp")
    beside.write_text(text)
    os.replace(beside, file)


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"grpo_jax run folder {name}")


class Interruption:
    """Ctrl-C (or a polite kill) asks the run to stop at the next step's end; a second one stops it at once."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Interruption:
        self._before = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._ask)
            except ValueError:  # not in the main thread: signals are someone else's
                break
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        os.write(2, b"\nstopping and saving after this step; Ctrl-C again stops at once\n")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self) -> bool:
        """Whether any host was asked; all hosts call this at the same place."""
        if jax.process_count() == 1:
            return self.asked
        return bool(multihost_utils.process_allgather(jax.numpy.asarray(self.asked)).any())
