from __future__ import annotations

import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from orbax.checkpoint._src.path import atomicity

from grpo_jax.checkpoint import Checkpointer, CheckpointError
from grpo_jax.config import Config
from grpo_jax.config.resume import config_differences
from grpo_jax.types import TrainState

HOST = {"key": [1, 4294967295], "data": {"epoch": 2, "position": 17}, "note": None, "rate": 0.1}
CONFIG = {"seed": 3, "model": {"width": 8}}


def _state(seed: int = 0, *, reference: bool = True, width: int = 6) -> TrainState:
    """A small state with all that one can hold: several dtypes, scalars, NamedTuples, empty nodes."""
    rng = np.random.default_rng(seed)
    params = {
        "embed": {"table": jnp.asarray(rng.normal(size=(8, width)), jnp.float32)},
        "layers": {
            "w": jnp.asarray(rng.normal(size=(2, 8, 4)), jnp.bfloat16),
            "odd": jnp.array([0.1, -0.0, np.inf, np.nan, 1e-40], jnp.float32),
        },
    }
    transform = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(mu_dtype=jnp.bfloat16),
        optax.add_decayed_weights(0.1),
        optax.scale_by_schedule(optax.linear_schedule(0.0, 1.0, 10)),
    )
    opt_state = transform.init(params)
    for _ in range(2):
        updates = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)
        _, opt_state = transform.update(updates, opt_state, params)
    return TrainState(
        params=params,
        ref_params=jax.tree.map(lambda p: p * 2, params) if reference else None,
        opt_state=opt_state,
        step=jnp.int32(seed),
    )


def _abstract(state: Any) -> Any:
    """The state's structure with the shardings that it has."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def _same(a: Any, b: Any) -> bool:
    """Equal structures (types of nodes too), shapes, dtypes and bits."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and _bytes(x) == _bytes(y) and x.shape == y.shape for x, y in pairs)


def _bytes(x: Any) -> bytes:
    return np.asarray(x).tobytes()


@pytest.fixture
def opened() -> Iterator[Callable[..., Checkpointer]]:
    """Makes checkpointers that are closed at the end of the test."""
    made: list[Checkpointer] = []

    def make(folder: Path, *, keep: int = 3, keep_best: int = 0) -> Checkpointer:
        made.append(Checkpointer(folder, keep=keep, keep_best=keep_best))
        return made[-1]

    yield make
    for checkpointer in made:
        checkpointer.close()


@pytest.fixture
def leaky() -> Iterator[None]:
    """Orbax leaves coroutines and event loops behind when it fails; their warnings belong to this test."""
    yield
    gc.collect()


# For tests in which Orbax itself fails.
orbax_fails = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine:RuntimeWarning"
)


@pytest.mark.parametrize("reference", [True, False])
def test_round_trip_is_exact(tmp_path, opened, reference: bool):
    state = _state(7, reference=reference)
    opened(tmp_path / "ckpt").save(7, state, host=HOST, config=CONFIG)
    reader = opened(tmp_path / "ckpt")
    restored, host = reader.restore(_abstract(state))
    assert _same(restored, state)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored))
    assert host == HOST
    assert reader.saved_config() == CONFIG
    assert (reader.latest_step(), reader.steps()) == (7, [7])


def test_comparison_of_states_can_fail():
    state = _state(1)
    changed = replace(state, params=jax.tree.map(lambda p: p, state.params))
    assert _same(state, changed)
    changed.params["layers"]["odd"] = changed.params["layers"]["odd"].at[1].set(0.0)  # -0.0 before
    assert not _same(state, changed)


def test_state_without_shardings_comes_back_on_the_devices_that_saved_it(tmp_path, opened):
    state = _state(1)
    opened(tmp_path).save(1, state, host={}, config={})
    restored, _ = opened(tmp_path).restore(jax.eval_shape(lambda: state))
    assert _same(restored, state)


def _on_mesh(state: TrainState, num_devices: int) -> TrainState:
    mesh = jax.make_mesh((num_devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:num_devices])

    def place(x: jax.Array) -> jax.Array:
        split = x.ndim > 1 and x.shape[0] % num_devices == 0
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec("data") if split else PartitionSpec()))

    return jax.tree.map(place, state)


@pytest.mark.parametrize(("saved_on", "restored_on"), [(1, 8), (8, 1), (8, 2)])
def test_restores_onto_another_number_of_devices(tmp_path, opened, saved_on: int, restored_on: int):
    state = _state(2)
    saved, wanted = _on_mesh(state, saved_on), _on_mesh(state, restored_on)
    table = wanted.params["embed"]["table"]
    assert table.sharding.shard_shape(table.shape) == (8 // restored_on, 6)
    opened(tmp_path).save(1, saved, host={}, config={})
    restored, _ = opened(tmp_path).restore(_abstract(wanted))
    assert _same(restored, state)
    shardings = zip(jax.tree.leaves(restored), jax.tree.leaves(wanted), strict=True)
    assert all(x.sharding == y.sharding for x, y in shardings)


def test_policy_is_read_without_the_rest(tmp_path, opened):
    state = _on_mesh(_state(3), 8)
    opened(tmp_path).save(3, state, host={}, config={})
    for item in ("optimizer", "reference", "host", "config", "metric"):
        shutil.rmtree(tmp_path / "3" / item)
    reader = opened(tmp_path)
    params = reader.restore_params()
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(params))
    assert _same(params, state.params)
    wanted = _abstract(_on_mesh(_state(3), 2).params)
    placed = reader.restore_params(3, wanted)
    assert _same(placed, state.params)
    assert placed["embed"]["table"].sharding == wanted["embed"]["table"].sharding


def test_keeps_the_newest_and_the_best(tmp_path, opened):
    checkpointer = opened(tmp_path, keep=2, keep_best=1)
    state = _state()
    kept = []
    metrics = [float("nan"), 0.5, 0.2, 0.5, 0.1, float("nan"), None]
    for step, metric in enumerate(metrics):
        checkpointer.save(step, state, host={}, config={}, metric=metric)
        kept.append((checkpointer.steps(), checkpointer.best_step()))
    assert kept == [
        ([0], None),
        ([0, 1], 1),
        ([1, 2], 1),
        ([2, 3], 3),  # equal to step 1, and later
        ([3, 4], 3),
        ([3, 4, 5], 3),
        ([3, 5, 6], 3),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "5", "6"]


def test_best_is_known_after_a_restart(tmp_path, opened):
    state = _state()
    for step, metric in enumerate([0.1, 0.9, 0.3, 0.2]):
        with closing(Checkpointer(tmp_path, keep=1, keep_best=2)) as checkpointer:
            checkpointer.save(step, state, host={}, config={}, metric=metric)
    assert opened(tmp_path).best_step() == 1
    assert opened(tmp_path).steps() == [1, 2, 3]


@pytest.mark.parametrize(("keep", "keep_best"), [(1, 3), (2, 0)])
def test_steps_without_a_metric_are_never_best(tmp_path, opened, keep: int, keep_best: int):
    checkpointer = opened(tmp_path, keep=keep, keep_best=keep_best)
    for step in range(4):
        checkpointer.save(step, _state(), host={}, config={})
    assert checkpointer.steps() == list(range(4))[-keep:]
    assert checkpointer.best_step() is None


def test_saving_the_same_step_again(tmp_path, opened):
    first = opened(tmp_path)
    first.save(1, _state(1), host={"n": 1}, config={})
    first.save(1, _state(1), host={"n": 1}, config={})
    resumed = opened(tmp_path)
    resumed.restore(_abstract(_state(1)))
    resumed.save(1, _state(1), host={"n": 1}, config={})
    with pytest.raises(CheckpointError, match="step 1 already"):
        opened(tmp_path).save(1, _state(2), host={"n": 2}, config={})
    restored, host = opened(tmp_path).restore(_abstract(_state(1)))
    assert _same(restored, _state(1)) and host == {"n": 1}


def test_what_is_no_json_is_refused_before_anything_is_written(tmp_path, opened):
    with pytest.raises(TypeError, match="ndarray"):
        opened(tmp_path / "c").save(1, _state(), host={"key": np.zeros(2)}, config={})
    assert not (tmp_path / "c").exists()


@contextmanager
def _files_limited_to(size: int) -> Iterator[None]:
    """Writing past ``size`` bytes of any file fails as on a full disk (EFBIG for ENOSPC)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


@orbax_fails
@pytest.mark.parametrize("limit", [0, 20, 3000])
def test_full_disk_keeps_what_was_saved(tmp_path, opened, leaky, limit: int):
    checkpointer = opened(tmp_path)
    # Noise, 64 KiB: it doesn't compress to under the limit.
    state = _state(1, width=2048)
    checkpointer.save(1, state, host=HOST, config=CONFIG)
    with _files_limited_to(limit), pytest.raises(CheckpointError) as caught:
        checkpointer.save(2, _state(2, width=2048), host=HOST, config=CONFIG)
    message = str(caught.value)
    assert isinstance(caught.value, OSError)
    assert f"could not save step 2 to {tmp_path}" in message
    assert "GiB free" in message
    assert "earlier checkpoints are intact, the newest is step 1" in message
    # Nothing of step 2 is left, the earlier step is whole, and there is a way on.
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert checkpointer.steps() == [1]
    restored, host = checkpointer.restore(_abstract(state))
    assert _same(restored, state) and host == HOST
    checkpointer.save(2, _state(2, width=2048), host=HOST, config=CONFIG)
    restored, _ = opened(tmp_path).restore(_abstract(state), 2)
    assert _same(restored, _state(2, width=2048))


def test_folder_that_cannot_be_made(tmp_path, opened):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not save step 1 .* there is no earlier checkpoint"):
        opened(tmp_path / "file" / "ckpt").save(1, _state(), host={}, config={})


@orbax_fails
def test_interrupted_save_leaves_nothing_and_can_be_repeated(tmp_path, opened, leaky, monkeypatch):
    checkpointer = opened(tmp_path)
    checkpointer.save(1, _state(1), host={}, config={})

    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(atomicity.AtomicRenameTemporaryPath, "finalize", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpointer.save(2, _state(2), host={}, config={})
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    checkpointer.save(2, _state(2), host={}, config={})
    assert _same(checkpointer.restore(_abstract(_state(2)))[0], _state(2))


def _small(step: int) -> TrainState:
    """A state that takes no compiling."""
    params = {"w": jnp.asarray(np.full((64, 64), step, np.float32))}
    moments = optax.TraceState(jnp.asarray(np.full((64, 64), -step, np.float32)))
    return TrainState(params=params, ref_params=params, opt_state=moments, step=jnp.asarray(np.int32(step)))


_SAVE_FOR_EVER = """
import itertools, os, sys, warnings
from pathlib import Path
from grpo_jax.checkpoint import Checkpointer
from tests.test_checkpoint import _small

def save_for_ever():
    checkpointer = Checkpointer(Path(sys.argv[1]), keep=1, keep_best=0)
    for step in itertools.count((checkpointer.latest_step() or 0) + 1):
        checkpointer.save(step, _small(step), host={"step": step}, config={})

warnings.simplefilter("ignore")
print("ready", flush=True)
for _ in sys.stdin:
    # A fork before JAX has started anything: a fresh process without its imports.
    child = os.fork()
    if child == 0:
        save_for_ever()
    print(child, flush=True)
    os.waitpid(child, 0)
"""


@contextmanager
def _process_that_saves(folder: Path) -> Iterator[Callable[[Callable[[], bool]], None]]:
    """Gives ``kill_when(seen)``: a process saves steps on end and is killed (-9) as soon as ``seen()``."""
    root = str(Path(__file__).parents[1])
    parent = subprocess.Popen(
        [sys.executable, "-c", _SAVE_FOR_EVER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": root},
        cwd=root,
    )
    assert parent.stdin is not None and parent.stdout is not None
    stdin, stdout = parent.stdin, parent.stdout

    def kill_when(seen: Callable[[], bool]) -> None:
        stdin.write(b"\n")
        stdin.flush()
        child = int(stdout.readline())
        try:
            deadline = time.monotonic() + 20
            while not seen():
                assert time.monotonic() < deadline
        finally:
            os.kill(child, signal.SIGKILL)

    with parent:
        assert stdout.readline() == b"ready\n"
        yield kill_when
        stdin.close()


def test_killed_while_saving_or_deleting(tmp_path, opened):
    folder = tmp_path / "ckpt"

    def unfinished() -> list[str]:
        return [path.name for path in folder.glob("*") if not path.name.isdigit()]

    def writing(pattern: str) -> Callable[[], bool]:
        def seen() -> bool:
            try:
                return any(folder.glob(pattern)) and any(path.name.isdigit() for path in folder.glob("*"))
            except FileNotFoundError:  # renamed while the search walked into it
                return False

        return seen

    newest = 0
    with _process_that_saves(folder) as kill_when:
        for seen in (
            writing("*tmp*/policy*"),
            writing("*tmp*/*/manifest.ocdbt"),
            writing("deleting"),
        ):
            kill_when(seen)
            checkpointer = opened(folder)
            steps = checkpointer.steps()
            assert steps and steps[-1] >= newest
            newest = steps[-1]
            for step in steps:
                restored, host = checkpointer.restore(_abstract(_small(0)), step)
                assert _same(restored, _small(step)) and host == {"step": step}
    # The next save cleans up.
    (folder / f"{newest + 9}.orbax-checkpoint-tmp").mkdir()
    opened(folder, keep=1).save(newest + 1, _small(newest + 1), host={}, config={})
    assert unfinished() == []


def test_reading_changes_nothing_on_disk(tmp_path, opened):
    opened(tmp_path).save(1, _state(1), host={}, config={}, metric=1.0)
    half = tmp_path / "2.orbax-checkpoint-tmp"
    half.mkdir()
    (half / "policy").write_text("being written by another process")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    reader = opened(tmp_path)
    assert (reader.steps(), reader.best_step(), reader.latest_step()) == ([1], 1, 1)
    reader.restore(_abstract(_state(1)))
    reader.restore_params()
    reader.saved_config()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert opened(tmp_path / "none").steps() == []
    assert not (tmp_path / "none").exists()


def test_missing_folder_or_step_is_named(tmp_path, opened):
    state = _abstract(_state(1))
    for call in (
        lambda c, step: c.restore(state, step),
        lambda c, step: c.restore_params(step),
        lambda c, step: c.saved_config(step),
    ):
        with pytest.raises(CheckpointError, match=f"no checkpoint folder {tmp_path}/none"):
            call(opened(tmp_path / "none"), None)
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(CheckpointError, match=f"{tmp_path}/empty holds no complete checkpoint"):
            call(opened(tmp_path / "empty"), None)
        for step in (1, 2):
            if step not in opened(tmp_path / "run").steps():
                opened(tmp_path / "run").save(step, _state(step), host={}, config={})
        with pytest.raises(CheckpointError, match=f"{tmp_path}/run has no checkpoint of step 5, but steps 1, 2"):
            call(opened(tmp_path / "run"), 5)


@orbax_fails
def test_any_broken_file_is_an_error_or_harmless(tmp_path, opened, leaky):
    """Each file of a step deleted or cut in half: the very state comes back, or an error that helps."""
    state = _state(2, width=64, reference=False)
    for step in (1, 2):
        opened(tmp_path).save(step, replace(state, step=jnp.int32(step)), host=HOST, config=CONFIG)
    folder = tmp_path / "2"
    refused = set()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        for broken in (None, content[: len(content) // 2]):
            path.unlink()
            if broken is not None:
                path.write_bytes(broken)
            reader = opened(tmp_path)
            try:
                restored, host = reader.restore(_abstract(state))
                assert _same(restored, state) and host == HOST
                assert reader.saved_config() == CONFIG
            except CheckpointError as error:
                refused.add((path.relative_to(folder).parts[0], path.name))
                assert f"{folder} cannot be read" in str(error)
                assert "other checkpoints there: step 1" in str(error)
            path.write_bytes(content)
    assert {("host", "metadata"), ("config", "metadata")} <= refused
    for item in ("policy", "optimizer"):
        assert {(item, "_METADATA"), (item, "manifest.ocdbt")} <= refused
    assert _same(opened(tmp_path).restore(_abstract(state))[0], state)
    # One broken step does not keep the other from being read, nor a run from saving on.
    (folder / "metric" / "metadata").write_text("{")
    shutil.rmtree(folder / "policy")
    checkpointer = opened(tmp_path, keep_best=1)
    assert checkpointer.restore(_abstract(state), 1)[0].step == 1
    checkpointer.save(3, state, host={}, config={}, metric=0.5)
    assert checkpointer.best_step() == 3


def test_other_shapes_are_refused_by_name(tmp_path, opened):
    opened(tmp_path).save(1, _state(1, width=6), host={}, config={})
    reader = opened(tmp_path)
    with pytest.raises(ValueError, match=r"embed/table: saved float32\[8, 6\], expected float32\[8, 4\]"):
        reader.restore(_abstract(_state(1, width=4)))
    with pytest.raises(ValueError, match=r"the policy in .*embed/table"):
        reader.restore_params(1, _abstract(_state(1, width=4).params))
    other = _state(1)
    other.params["extra"] = jnp.zeros(3)
    del other.params["layers"]["odd"]
    with pytest.raises(ValueError, match=r"extra: saved absent.*layers/odd: saved float32\[5\], .* absent"):
        reader.restore(_abstract(other))
    casting = jax.tree.map(lambda p: p.astype(jnp.bfloat16), _state(1).params)
    with pytest.raises(ValueError, match=r"saved float32\[8, 6\], expected bfloat16\[8, 6\]"):
        reader.restore_params(1, _abstract(casting))


def test_other_optimizer_is_refused(tmp_path, opened):
    state = _state(1)
    opened(tmp_path).save(1, state, host={}, config={})
    other = replace(state, opt_state=optax.sgd(0.1, momentum=0.9).init(state.params))
    with pytest.raises(ValueError, match="the optimizer in .* does not fit"):
        opened(tmp_path).restore(_abstract(other))


def test_missing_reference_is_named(tmp_path, opened):
    opened(tmp_path).save(1, _state(1, reference=False), host={}, config={})
    with pytest.raises(CheckpointError, match="has no 'reference' item"):
        opened(tmp_path).restore(_abstract(_state(1)))


def _changed(config: Config, **sections: dict[str, Any]) -> dict[str, Any]:
    parts = {name: replace(getattr(config, name), **fields) for name, fields in sections.items()}
    return asdict(replace(config, **parts))


def test_config_that_may_change():
    config = Config()
    current = _changed(
        config,
        train={"steps": 999},
        log={"every": 7, "table_every": 0},
        eval={"samples": 9},
        checkpoint={"keep": 9},
    )
    assert config_differences(asdict(config), current) == []
    assert config_differences(asdict(config), asdict(config)) == []


def test_config_that_may_not_change_is_listed():
    config = Config()
    current = _changed(config, rollout={"group_size": 8}, train={"updates_per_batch": 2}, log={"every": 2})
    current["seed"] = 5
    assert config_differences(asdict(config), current) == [
        "rollout.group_size: saved 16, now 8",
        "seed: saved 0, now 5",
        "train.updates_per_batch: saved 1, now 2",
    ]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_steps_may_not_change_under_a_schedule_that_counts_them(schedule: str):
    config = replace(Config(), optimizer=replace(Config().optimizer, schedule=schedule))
    (line,) = config_differences(asdict(config), _changed(config, train={"steps": 200}))
    assert line == f"train.steps: saved 100, now 200 (the learning-rate schedule '{schedule}' depends on it)"
    assert config_differences(asdict(config), _changed(config, eval={"every": 3})) == []


def test_config_fields_on_one_side_only():
    assert config_differences({"a": {"b": 1}, "eval": {"x": 1}}, {"a": {"c": None}}) == [
        "a.b: saved 1, now absent",
        "a.c: saved absent, now None",
    ]


def test_config_survives_json(tmp_path, opened):
    config = replace(Config(), task=replace(Config().task, reward_weights=(1.0, 0.5)))
    opened(tmp_path).save(1, _state(), host={}, config=asdict(config))
    saved = opened(tmp_path).saved_config()
    assert config_differences(saved, asdict(config)) == []
    assert config_differences(saved, _changed(config, task={"reward_weights": (1.0, 0.25)})) == [
        "task.reward_weights: saved [1.0, 0.5], now [1.0, 0.25]"
    ]
