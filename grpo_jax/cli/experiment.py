"""Loading an experiment file: Python with ``get_config()``, and ``get_task(config)`` for a task of its own.

What goes wrong inside the file is reported with the file's own line, not with a traceback through the loader.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from grpo_jax.config import Config

if TYPE_CHECKING:
    from grpo_jax.tasks.base import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment file that has been run."""

    path: Path
    config: Config
    """What get_config() returned. An experiment left without a name has the file's; where the file
    defines get_task, task.name is "custom"."""
    get_task: Callable[[Config], Task] | None

    def make_task(self, config: Config) -> Task | None:
        """The file's own task for ``config``, or None where the config names one of the package's.

        Raises:
            ValueError: the config asks for a custom task and the file has none, or get_task failed.
        """
        if config.task.name != "custom":
            return None
        if self.get_task is None:
            raise ValueError(
                f'{self.path}: task.name is "custom", but the file defines no get_task(config) that returns '
                "a Task; define it, or choose a task of grpo_jax.tasks.TASKS with --task.name"
            )
        from grpo_jax.tasks.base import Task

        task = _call(self.get_task, config, path=self.path)
        if not isinstance(task, Task):
            raise ValueError(f"{self.path}: get_task(config) must return a grpo_jax.tasks.base.Task, got {task!r}")
        return task


def load_experiment(path: Path) -> Experiment:
    """Run an experiment file and its get_config().

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a Python file, fails, or get_config() is missing or returns something else.
    """
    if not path.is_file():
        raise FileNotFoundError(f"experiment file {path} does not exist{_others_nearby(path)}")
    if path.suffix != ".py":
        raise ValueError(f"experiment file {path} must be a Python file (.py) that defines get_config()")
    module = _run_file(path)
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        raise ValueError(f"{path}: the file must define get_config() that returns a grpo_jax.config.Config")
    config = _call(get_config, path=path)
    if not isinstance(config, Config):
        raise ValueError(f"{path}: get_config() must return a grpo_jax.config.Config, got {config!r}")
    get_task = getattr(module, "get_task", None)
    if config.experiment == Config.experiment:
        config = dataclasses.replace(config, experiment=path.stem)
    if get_task is not None:
        config = dataclasses.replace(config, task=dataclasses.replace(config.task, name="custom"))
    return Experiment(path=path, config=config, get_task=get_task)


def _run_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"experiment_{path.stem}", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name. Neighbours of the file can be imported, as if it were run by
    # itself, but must not hide an installed package: hence at the end.
    sys.modules[spec.name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    _call(spec.loader.exec_module, module, path=path)
    return module


def _call(function: Callable[..., Any], *args: Any, path: Path) -> Any:
    """Call a function of the file; its failure becomes a ValueError that names the file's line."""
    try:
        return function(*args)
    except Exception as error:
        raise ValueError(_located(error, path)) from error


def _located(error: Exception, path: Path) -> str:
    """``file:line: message`` of the innermost line of ``path`` that takes part in the error."""
    message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if os.path.realpath(frame.filename) == os.path.realpath(path)
    ]
    return f"{path}:{lines[-1]}: {message}" if lines else f"{path}: {message}"


def _others_nearby(path: Path) -> str:
    names = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
    return f"; {path.parent} has {', '.join(names)}" if names else ""
