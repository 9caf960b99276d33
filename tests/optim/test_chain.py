"""The optimizer against the textbook's formulas in NumPy, float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from grpo_jax.config import ModelConfig, OptimizerConfig
from grpo_jax.models.config import DecoderConfig
from grpo_jax.models.decoder import init_params
from grpo_jax.optim.chain import learning_rate_schedule, make_optimizer, nonfinite_counts

STEPS = 12
# Float64 on both sides but for the learning rate, which schedules compute in float32 (6e-8, relative):
# a dozen updates of at most 0.03 * 5 each.
CLOSE = {"rtol": 0, "atol": 2e-7}

# Path -> shape, and whether it is a matrix that decays. What is under "layers" has the layers in front.
LEAVES = {
    "embed": ((7, 3), False),
    "layers/qkv": ((2, 3, 2, 4), True),
    "layers/qkv_bias": ((2, 2, 4), False),
    "layers/norm": ((2, 3), False),
    "norm": ((3,), False),
    "head": ((7, 3), True),
}

Flat = dict[str, np.ndarray]


def nested(flat: Flat) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *folders, name = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = jnp.asarray(leaf)
    return tree


def flat(tree: dict[str, Any]) -> Flat:
    return {
        "/".join(key.key for key in path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def random_leaves(seed: int, scale: float = 1.0) -> Flat:
    rng = np.random.default_rng(seed)
    return {path: rng.normal(0, scale, shape) for path, (shape, _) in LEAVES.items()}


def gradients_of_step(step: int) -> Flat:
    """Of norm about 0.8 in even steps and 80 in odd ones: below and above the clip at 1."""
    return random_leaves(100 + step, scale=0.1 if step % 2 == 0 else 10.0)


# ------------------------------------------------------------------------------------------ reference


def reference_learning_rate(config: OptimizerConfig, total_updates: int, update: int) -> float:
    """Of the update that follows ``update`` earlier ones."""
    if update < config.warmup_steps:
        return config.learning_rate * update / config.warmup_steps
    done = min((update - config.warmup_steps) / max(total_updates - config.warmup_steps, 1), 1.0)
    course = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    floor = 1.0 if config.schedule == "constant" else config.final_fraction
    return config.learning_rate * (floor + (1 - floor) * course[config.schedule])


def adamw_direction(config: OptimizerConfig, state: dict[str, Any], path: str, g: np.ndarray) -> np.ndarray:
    """The second moment's root is of bias-corrected moments, and eps is added outside of it."""
    m, v, t = state.get(path, (0.0, 0.0, 0))
    m, v, t = config.b1 * m + (1 - config.b1) * g, config.b2 * v + (1 - config.b2) * g**2, t + 1
    state[path] = (m, v, t)
    return (m / (1 - config.b1**t)) / (np.sqrt(v / (1 - config.b2**t)) + config.eps)


def lion_direction(config: OptimizerConfig, state: dict[str, Any], path: str, g: np.ndarray) -> np.ndarray:
    m = state.get(path, np.zeros_like(g))
    state[path] = config.b2 * m + (1 - config.b2) * g
    return np.sign(config.b1 * m + (1 - config.b1) * g)


def sgd_direction(config: OptimizerConfig, state: dict[str, Any], path: str, g: np.ndarray) -> np.ndarray:
    state[path] = config.b1 * state.get(path, 0.0) + g
    return state[path]


DIRECTIONS: dict[str, Callable[..., np.ndarray]] = {
    "adamw": adamw_direction,
    "lion": lion_direction,
    "sgd": sgd_direction,
}


def reference_run(config: OptimizerConfig, total_updates: int, gradients: list[Flat]) -> Flat:
    """Parameters after these gradients, the ones that aren't finite left out."""
    params, state, updates = random_leaves(0), {}, 0
    for gradient in gradients:
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradient.values()))
        if not math.isfinite(norm):
            continue
        shrink = min(1.0, config.clip_norm / norm) if config.clip_norm is not None else 1.0
        rate = reference_learning_rate(config, total_updates, updates)
        for path, g in gradient.items():
            step = DIRECTIONS[config.name](config, state, path, g * shrink)
            if config.decay == "all" or LEAVES[path][1]:
                step = step + config.weight_decay * params[path]
            params[path] = params[path] - rate * step
        updates += 1
    return params


def run(config: OptimizerConfig, total_updates: int, gradients: list[Flat]) -> tuple[Flat, Any]:
    """Parameters and optimizer state after these gradients, each update compiled."""
    optimizer = make_optimizer(config, total_updates)

    @jax.jit
    def update(params: Any, state: Any, gradient: Any) -> Any:
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    params = nested(random_leaves(0))
    state = optimizer.init(params)
    for gradient in gradients:
        params, state = update(params, state, nested(gradient))
    return flat(params), state


def assert_same(got: Flat, expected: Flat) -> None:
    assert got.keys() == expected.keys()
    for path in got:
        np.testing.assert_allclose(got[path], expected[path], err_msg=path, **CLOSE)


# ---------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("name", sorted(DIRECTIONS))
@pytest.mark.parametrize("decay", ["matrices", "all"])
def test_equals_reference(x64, name, decay) -> None:
    config = OptimizerConfig(
        name=name,
        learning_rate=0.03,
        schedule="cosine",
        warmup_steps=3,
        final_fraction=0.1,
        b1=0.8,
        b2=0.97,
        eps=1e-3,
        weight_decay=0.2,
        decay=decay,
        clip_norm=1.0,
    )
    gradients = [gradients_of_step(step) for step in range(STEPS)]
    got, _ = run(config, STEPS, gradients)
    assert_same(got, reference_run(config, STEPS, gradients))


@pytest.mark.parametrize(
    "changes",
    [
        {"clip_norm": None},
        {"clip_norm": 50.0},
        {"weight_decay": 0.0},
        {"schedule": "linear"},
        {"schedule": "constant", "warmup_steps": 0},
        {"b2": 0.999, "eps": 1e-8},
    ],
    ids=str,
)
def test_adamw_equals_reference_for_other_settings(x64, changes) -> None:
    settings = {"learning_rate": 0.03, "warmup_steps": 2, "weight_decay": 0.2} | changes
    config = OptimizerConfig(**settings)
    gradients = [gradients_of_step(step) for step in range(5)]
    got, _ = run(config, 5, gradients)
    assert_same(got, reference_run(config, 5, gradients))


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "sgd"])
def test_every_optimizer_lowers_a_quadratic(name) -> None:
    optimizer = make_optimizer(OptimizerConfig(name=name, learning_rate=0.02, clip_norm=None), 20)

    @jax.jit
    def update(params: Any, state: Any) -> Any:
        updates, state = optimizer.update(params, state, params)
        return optax.apply_updates(params, updates), state

    params = nested(random_leaves(0))
    state, before = optimizer.init(params), optax.tree.norm(params)
    for _ in range(20):
        params, state = update(params, state)
    assert optax.tree.norm(params) < 0.95 * before


def test_of_a_decoder_the_weight_matrices_decay() -> None:
    """With gradients 0 the first update is the decay alone."""
    model = DecoderConfig.from_model_config(ModelConfig(), 11)
    model = dataclasses.replace(model, qkv_bias=True, tie_embeddings=False)
    params = jax.tree.map(
        lambda x: jnp.ones(x.shape), jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    )
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1.0, weight_decay=0.5), 10)
    updates, _ = jax.jit(optimizer.update)(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    decayed = {path for path, update in flat(updates).items() if (update == -0.5).all()}
    kept = {path for path, update in flat(updates).items() if (update == 0).all()}
    assert decayed == {"head", "layers/qkv", "layers/out", "layers/gate", "layers/up", "layers/down"}
    assert kept == {"embed", "norm", "layers/attn_norm", "layers/mlp_norm", "layers/qkv_bias"}


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 10])
@pytest.mark.parametrize("final_fraction", [0.0, 0.25])
def test_learning_rate_schedule(x64, schedule, warmup_steps, final_fraction) -> None:
    config = OptimizerConfig(
        learning_rate=3e-4, schedule=schedule, warmup_steps=warmup_steps, final_fraction=final_fraction
    )
    schedule_fn = learning_rate_schedule(config, 50)
    got = [float(schedule_fn(update)) for update in range(60)]
    expected = [reference_learning_rate(config, 50, update) for update in range(60)]
    # Schedules may compute in float32.
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-10)
    assert max(got) == pytest.approx(3e-4, rel=1e-6)


def test_the_schedule_passes_its_landmarks() -> None:
    config = OptimizerConfig(learning_rate=1.0, schedule="cosine", warmup_steps=10, final_fraction=0.2)
    rate = learning_rate_schedule(config, 110)
    landmarks = {0: 0.0, 5: 0.5, 10: 1.0, 60: 0.6, 110: 0.2, 1000: 0.2}
    np.testing.assert_allclose([float(rate(u)) for u in landmarks], list(landmarks.values()), atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(x64, bad) -> None:
    """Parameters, moments and schedule go on as if it had not been there, however many come in a row."""
    config = OptimizerConfig(learning_rate=0.03, warmup_steps=3, weight_decay=0.2, max_nonfinite=1)
    good = [gradients_of_step(step) for step in range(4)]
    broken = random_leaves(7)
    broken["layers/norm"][0, 0] = bad
    got, state = run(config, 10, [good[0], *[broken] * 4])
    assert_same(got, reference_run(config, 10, good[:1]))
    assert tuple(int(count) for count in nonfinite_counts(state)) == (4, 4)
    got, state = run(config, 10, [*good[:2], broken, good[2], *[broken] * 4, good[3]])
    assert_same(got, reference_run(config, 10, good))
    assert tuple(int(count) for count in nonfinite_counts(state)) == (0, 5)


def test_a_skipped_update_leaves_every_number_of_the_state_but_the_counts() -> None:
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.03, weight_decay=0.2), 10)
    params = jax.tree.map(lambda x: x.astype(jnp.float32), nested(random_leaves(0)))
    state = optimizer.init(params)
    _, state = optimizer.update(params, state, params)
    updates, after = optimizer.update(jax.tree.map(lambda x: x * jnp.nan, params), state, params)
    assert all((np.asarray(u) == 0).all() for u in jax.tree.leaves(updates))
    changed = [
        jax.tree_util.keystr(path)
        for (path, old), new in zip(
            jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(after), strict=True
        )
        if (np.asarray(old) != np.asarray(new)).any()
    ]
    assert changed == [".notfinite_count", ".last_finite", ".total_notfinite"]


def test_an_update_keeps_every_sharding() -> None:
    """Moments are sharded like their parameters, before and after, on eight devices."""
    mesh = Mesh(np.array(jax.devices()).reshape(8), ("fsdp",), axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, PartitionSpec("fsdp")), NamedSharding(mesh, PartitionSpec())
    params = {"head": jax.device_put(jnp.ones((16, 4)), split), "norm": jax.device_put(jnp.ones(4), whole)}
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1, weight_decay=0.1), 10)
    state = optimizer.init(params)

    @jax.jit
    def update(params: Any, state: Any) -> Any:
        updates, state = optimizer.update(params, state, params)
        return optax.apply_updates(params, updates), state

    new_params, new_state = update(params, state)
    assert new_params["head"].sharding.is_equivalent_to(split, 2)
    matrices = [leaf for leaf in jax.tree.leaves((state, new_state)) if leaf.shape == (16, 4)]
    assert len(matrices) == 4  # two moments, before and after
    assert all(leaf.sharding.is_equivalent_to(split, 2) for leaf in matrices)
