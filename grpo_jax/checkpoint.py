"""Checkpoints: all that the next step depends on, in one folder a step that is complete or not there.

Orbax writes a step beside its place and renames it when all is on disk; old steps are renamed away before
they are deleted. A step holds the items ``policy``, ``reference`` (only with a KL term), ``optimizer`` (with
the step count), ``ahead`` (only with a rollout sampled ahead), ``host`` (random keys, data position), ``config``
and ``metric``; reading one does not read the others.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import (
    AnyPreservationPolicy,
    LatestN,
    PolicyCheckpointInfo,
    PreservationContext,
)

from grpo_jax.types import Params, Rollout, TrainState

_log = logging.getLogger(__name__)

_TRASH = "deleting"
_ABSENT = "absent"


class CheckpointError(OSError):
    """A checkpoint could not be written or read; the message names the folder and what is left."""


@dataclass
class _Best:
    """Preserves the ``n`` steps of the highest metric; the later of equal ones; none without a metric."""

    n: int
    metric_of: Callable[[int], float | None]

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        best = {step for _, step in _ranked([info.step for info in checkpoints], self.metric_of)[: self.n]}
        return [info.step in best for info in checkpoints]


class Checkpointer:
    """The checkpoints of one run.

    Opening one changes nothing on disk, so that a run can be evaluated while it trains. The first save makes
    the folder and removes what a killed process left of an unfinished step.

    Args:
        folder: where the steps lie, one folder each, named by its number.
        keep: newest steps kept.
        keep_best: steps of the highest metric kept beside them.
    """

    def __init__(self, folder: Path, *, keep: int, keep_best: int) -> None:
        self.folder = Path(folder).absolute()
        self._keep = keep
        self._keep_best = keep_best
        self._metrics: dict[int, float | None] = {}
        self._current: int | None = None
        self._manager: ocp.CheckpointManager | None = None
        self._writable = False

    def _open(self, *, writable: bool) -> ocp.CheckpointManager:
        """Orbax's manager; one opened for reading is opened anew for writing."""
        if self._manager is not None and (self._writable or not writable):
            return self._manager
        self.close()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy([LatestN(self._keep), _Best(self._keep_best, self._metric)]),
            create=writable,
            cleanup_tmp_directories=writable,
            # Deleting file by file could be killed half-way and leave what looks like a complete step.
            todelete_subdir=_TRASH,
            # A failed save is reported by the call that failed, not by the next one.
            enable_async_checkpointing=False,
            # One unreadable step must not keep the others from being opened.
            lightweight_initialize=True,
            save_root_metadata=False,
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options)
        self._writable = writable
        return self._manager

    def save(
        self,
        step: int,
        state: TrainState,
        *,
        host: Mapping[str, Any],
        config: Mapping[str, Any],
        metric: float | None = None,
    ) -> None:
        """Write one step; it is on disk and complete when this returns.

        A step that this object has saved or restored last is left as it is.

        Args:
            step: the step's number.
            state: the arrays; all processes call this with their parts of them.
            host: what the next step depends on beside arrays (JSON).
            config: the run's config (JSON).
            metric: what ``keep_best`` ranks by, higher is better; None or NaN: this step is never a best one.

        Raises:
            CheckpointError: nothing was saved, for want of space or another reason, or the folder holds this
                step from elsewhere. Earlier checkpoints are untouched.
        """
        if step == self._current:
            return
        if step in self.steps():
            raise CheckpointError(
                f"{self.folder} holds a checkpoint of step {step} already, written by another run: "
                "move the folder away, or resume from that step"
            )
        rating = None if metric is None or math.isnan(metric) else float(metric)
        host, config = (json.loads(json.dumps(part)) for part in (host, config))
        items = {
            "policy": ocp.args.StandardSave(state.params),
            "optimizer": ocp.args.StandardSave({"opt_state": state.opt_state, "step": state.step}),
            "host": ocp.args.JsonSave(host),
            "config": ocp.args.JsonSave(config),
            "metric": ocp.args.JsonSave({"metric": rating}),
        }
        if state.ref_params is not None:
            items["reference"] = ocp.args.StandardSave(state.ref_params)
        if state.ahead is not None:
            items["ahead"] = ocp.args.StandardSave(vars(state.ahead))
        self._metrics[step] = rating
        try:
            with _quiet():
                try:
                    self._open(writable=True).save(step, args=ocp.args.Composite(**items), force=True)
                except BaseException:
                    self._discard_unfinished()
                    raise
            self._empty_trash()
        except BaseException as error:
            if step in self.steps():
                self._current = step
                _log.warning("step %d is saved, but clearing up after it failed: %r", step, error)
            else:
                del self._metrics[step]
                if isinstance(error, Exception):
                    raise CheckpointError(self._failed_save(step, error)) from error
            if not isinstance(error, Exception):
                raise
        self._current = step

    def _empty_trash(self) -> None:
        if jax.process_index() == 0:
            shutil.rmtree(self.folder / _TRASH, ignore_errors=True)

    def _discard_unfinished(self) -> None:
        """Free the space of a failed save now; the next save starts from a clean folder in any case."""
        # The first thread to fail ends the save; the others may write, and start others, for a while yet.
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and (threads := _orbax_threads()):
            # Their own join would raise what they have failed with.
            threading.Thread.join(threads[0], timeout=1)
        with suppress(Exception):
            self.close()
        self._manager = None
        if jax.process_index() == 0:
            for path in self.folder.glob(f"*{ocp.path.step.TMP_DIR_SUFFIX}*"):
                shutil.rmtree(path, ignore_errors=True)

    def _failed_save(self, step: int, error: Exception) -> str:
        existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free / 2**30
        newest = self.latest_step()
        left = "there is no earlier checkpoint"
        if newest is not None:
            left = f"earlier checkpoints are intact, the newest is step {newest}"
        return f"could not save step {step} to {self.folder}: {_cause(error)} ({free:.2f} GiB free there); {left}"

    def steps(self) -> list[int]:
        """The complete steps in the folder, in rising order; empty if there is no such folder."""
        return sorted(ocp.utils.checkpoint_steps(self.folder)) if self.folder.is_dir() else []

    def latest_step(self) -> int | None:
        """The newest complete step, or None."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """The step of the highest metric (the later of equal ones), or None if no step has one."""
        ranked = _ranked(self.steps(), self._metric)
        return ranked[0][1] if ranked else None

    def _metric(self, step: int) -> float | None:
        """The metric that a step was saved with; None for none, also if it cannot be read."""
        if step not in self._metrics:
            try:
                self._metrics[step] = self._read(step, metric=ocp.args.JsonRestore()).metric["metric"]
            except CheckpointError:
                return None
        return self._metrics[step]

    def restore(self, abstract_state: TrainState, step: int | None = None) -> tuple[TrainState, dict[str, Any]]:
        """Read a whole step, onto the devices that ``abstract_state`` names.

        Args:
            abstract_state: the state's structure, with ``jax.ShapeDtypeStruct`` leaves that carry shardings;
                mesh and number of devices may differ from those that saved.
            step: None for the newest.

        Returns:
            The state, and the ``host`` part that was saved with it.

        Raises:
            CheckpointError: there is no such step, or it is broken.
            ValueError: what was saved has other arrays or shapes than ``abstract_state``.
        """
        step = self._resolve(step)
        optimizer = {"opt_state": abstract_state.opt_state, "step": abstract_state.step}
        trees = {"policy": abstract_state.params, "optimizer": optimizer}
        if abstract_state.ref_params is not None:
            trees["reference"] = abstract_state.ref_params
        if abstract_state.ahead is not None:
            trees["ahead"] = vars(abstract_state.ahead)
        for item, tree in trees.items():
            self._check_arrays(step, item, tree)
        items = {item: ocp.args.StandardRestore(tree) for item, tree in trees.items()}
        read = self._read(step, host=ocp.args.JsonRestore(), **items)
        self._current = step
        state = TrainState(
            params=read.policy,
            ref_params=read.get("reference"),
            opt_state=read.optimizer["opt_state"],
            step=read.optimizer["step"],
            ahead=None if abstract_state.ahead is None else Rollout(**read.ahead),
        )
        return state, read.host

    def restore_params(self, step: int | None = None, abstract: Params | None = None) -> Params:
        """Read a step's policy only.

        Args:
            step: None for the newest.
            abstract: the parameters' structure, as in :meth:`restore`. None: nested dictionaries of NumPy
                arrays, whatever devices saved them.

        Raises:
            CheckpointError: there is no such step, or it is broken.
            ValueError: what was saved has other arrays or shapes than ``abstract``.
        """
        step = self._resolve(step)
        if abstract is not None:
            self._check_arrays(step, "policy", abstract)
            return self._read(step, policy=ocp.args.StandardRestore(abstract)).policy
        saved = self._saved_arrays(step, "policy")
        arrays = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), saved)
        return self._read(step, policy=ocp.args.StandardRestore(arrays)).policy

    def saved_config(self, step: int | None = None) -> dict[str, Any]:
        """The config that a step (None: the newest) was saved with, as nested dictionaries.

        Raises:
            CheckpointError: there is no such step, or it is broken.
        """
        config: dict[str, Any] = self._read(self._resolve(step), config=ocp.args.JsonRestore()).config
        return config

    def _resolve(self, step: int | None) -> int:
        steps = self.steps()
        if not self.folder.is_dir():
            raise CheckpointError(f"there is no checkpoint folder {self.folder}")
        if not steps:
            raise CheckpointError(f"{self.folder} holds no complete checkpoint")
        if step is not None and step not in steps:
            raise CheckpointError(f"{self.folder} has no checkpoint of step {step}, but {_listed(steps)}")
        return steps[-1] if step is None else step

    def _read(self, step: int, **items: Any) -> Any:
        try:
            with _quiet():
                return self._open(writable=False).restore(step, args=ocp.args.Composite(**items))
        except Exception as error:
            raise CheckpointError(self._broken(step, error)) from error

    def _saved_arrays(self, step: int, item: str) -> Any:
        """Shapes and dtypes of an item's arrays, as Orbax's metadata."""
        try:
            folder = self._open(writable=False).directory / str(step) / item
            return ocp.StandardCheckpointHandler().metadata(folder).tree
        except Exception as error:
            raise CheckpointError(self._broken(step, error)) from error

    def _check_arrays(self, step: int, item: str, abstract: Any) -> None:
        """Refuse to restore onto other shapes: Orbax would cast dtypes in silence."""
        if not (self.folder / str(step) / item).is_dir():
            raise CheckpointError(self._broken(step, f"it has no {item!r} item"))
        saved = {name: _signature(leaf) for name, leaf in _named(self._saved_arrays(step, item))}
        wanted = {name: _signature(leaf) for name, leaf in _named(abstract)}
        lines = [
            f"{name}: saved {saved.get(name, _ABSENT)}, expected {wanted.get(name, _ABSENT)}"
            for name in sorted(saved.keys() | wanted.keys())
            if saved.get(name) != wanted.get(name)
        ]
        if lines:
            more = f" and {len(lines) - 5} more" if len(lines) > 5 else ""
            raise ValueError(
                f"the {item} in {self.folder / str(step)} does not fit this run's config: "
                + "; ".join(lines[:5])
                + more
            )

    def _broken(self, step: int, cause: Exception | str) -> str:
        others = [other for other in self.steps() if other != step]
        left = f"other checkpoints there: {_listed(others)}" if others else "there is no other checkpoint"
        reason = cause if isinstance(cause, str) else _cause(cause)
        return f"the checkpoint {self.folder / str(step)} cannot be read: {reason}; {left}"

    def close(self) -> None:
        """Free what Orbax holds; saves are complete already."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None


def _ranked(steps: Sequence[int], metric_of: Callable[[int], float | None]) -> list[tuple[float, int]]:
    """(metric, step) from the best on, the later of equal ones first; steps without a metric left out."""
    return sorted(((m, step) for step in steps if (m := metric_of(step)) is not None), reverse=True)


def _named(tree: Any) -> list[tuple[str, Any]]:
    return list(ocp.tree.to_flat_dict(tree, sep="/").items())


def _signature(leaf: Any) -> str:
    shape = ", ".join(str(size) for size in getattr(leaf, "shape", ()))
    return f"{np.dtype(leaf.dtype).name}[{shape}]"


def _listed(steps: Sequence[int]) -> str:
    return ("step " if len(steps) == 1 else "steps ") + ", ".join(str(step) for step in steps)


def _cause(error: Exception) -> str:
    """The error in one line, without TensorStore's description of its own settings."""
    lines = str(error).partition(" [tensorstore_spec=")[0].partition(" [source locations=")[0].split("\n")
    return f"{type(error).__name__}: {lines[0]}"


def _orbax_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if type(thread).__module__.startswith("orbax.")]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Orbax from printing the traceback of each of its threads: the error that is raised says it all."""
    logger, hook = logging.getLogger("absl"), sys.unraisablehook
    disabled, logger.disabled = logger.disabled, True
    sys.unraisablehook = lambda error: None if "loop is closed" in str(error.exc_value) else hook(error)
    try:
        yield
    finally:
        logger.disabled, sys.unraisablehook = disabled, hook
