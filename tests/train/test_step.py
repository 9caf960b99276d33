"""The compiled step on a small real decoder: agreement with the sampler, invariances, reference, bad gradients."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax.algorithms.importance import importance_weights
from grpo_jax.algorithms.objectives import grpo_loss, policy_loss
from grpo_jax.config import (
    Config,
    MeshConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ReferenceConfig,
    RolloutConfig,
    TrainConfig,
)
from grpo_jax.mesh import GROUP_AXES, PROMPT_AXES, make_mesh, partition_spec, place_params
from grpo_jax.models.config import DecoderConfig
from grpo_jax.models.decoder import Decoder, init_params, logical_axes
from grpo_jax.optim.chain import make_optimizer
from grpo_jax.rollout.engine import generate
from grpo_jax.rollout.sampler import pad_left
from grpo_jax.rollout.sampling import SamplingParams
from grpo_jax.rollout.state import EngineConfig
from grpo_jax.train.step import TrainStep
from grpo_jax.types import Params, Rollout, TrainBatch, TrainState

P, G, S, T, VOCAB, KNOWN = 8, 4, 6, 7, 24, 20
DECODER = DecoderConfig(
    vocab_size=VOCAB,
    num_layers=2,
    width=32,
    ffn_width=48,
    num_heads=4,
    num_kv_heads=2,
    head_width=8,
    rope_theta=10_000.0,
    norm_eps=1e-5,
    qkv_bias=True,
    tie_embeddings=False,
)
MODEL = Decoder(DECODER)


@functools.cache
def params() -> Params:
    # Larger than a fresh model's, so that distributions are far from uniform.
    return jax.tree.map(lambda x: x * 4, init_params(DECODER, jax.random.key(0)))


@functools.cache
def rollout(temperature: float = 1.0, top_p: float = 1.0, model: Decoder = MODEL) -> Rollout:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, KNOWN, size=rng.integers(1, S + 1)).tolist() for _ in range(P)]
    ids, mask = pad_left(prompts, S, 0)
    config = EngineConfig(
        group_size=G,
        max_completion_length=T,
        vocab_size=KNOWN,
        eos_ids=(1, 2),
        pad_id=0,
        sampling=SamplingParams(temperature=temperature, top_p=top_p),
    )
    compiled = jax.jit(generate, static_argnames=("model", "config"))
    return compiled(model, params(), jnp.asarray(ids), jnp.asarray(mask), jax.random.key(1), None, config)


def make_config(**objective: Any) -> Config:
    return Config(
        rollout=RolloutConfig(num_prompts=P, group_size=G, max_completion_length=T),
        objective=ObjectiveConfig(**objective),
        # Plain gradient descent: an update is the gradient, where Adam would blow up its rounding errors.
        optimizer=OptimizerConfig(name="sgd", b1=0.0, learning_rate=1.0, clip_norm=None),
        train=TrainConfig(logps_chunk=64),
    )


def batch_of(sample: Rollout, **changes: Any) -> TrainBatch:
    advantages = np.random.default_rng(1).normal(size=(P, G)).astype(np.float32)
    return TrainBatch(
        prompt_PS=sample.prompt_PS,
        prompt_mask_PS=sample.prompt_mask_PS,
        completion_PGT=sample.completion_PGT,
        loss_mask_PGT=sample.completion_mask_PGT,
        sampler_logps_PGT=sample.sampler_logps_PGT,
        advantages_PG=jnp.asarray(advantages),
        old_logps_PGT=None,
        ref_logps_PGT=None,
    ).replace(**changes)


def make_step(config: Config) -> TrainStep:
    return TrainStep(MODEL, make_optimizer(config.optimizer, 100), config, KNOWN)


def start(config: Config, weights: Params | None = None) -> TrainState:
    weights = params() if weights is None else weights
    return TrainState(
        params=weights,
        ref_params=weights if config.objective.beta > 0 else None,
        opt_state=make_optimizer(config.optimizer, 100).init(weights),
        step=jnp.int32(0),
    )


def with_train(config: Config, **changes: Any) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


def assert_trees_close(a: Any, b: Any, *, atol: float) -> None:
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=atol, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampler_and_trainer_agree_on_unchanged_weights(temperature: float) -> None:
    sample = rollout(temperature)
    config = dataclasses.replace(
        make_config(), rollout=dataclasses.replace(make_config().rollout, temperature=temperature)
    )
    logps_PGT, _ = jax.jit(make_step(config).logps)(params(), batch_of(sample))
    gap = np.abs(np.where(sample.completion_mask_PGT, logps_PGT - sample.sampler_logps_PGT, 0))
    # The required bound is 1e-4; float32 sums of this size differ by a few 1e-6.
    assert gap.max() < 2e-5
    _, metrics = jax.jit(make_step(config).train_step)(start(config), batch_of(sample))
    assert float(metrics["sampler_gap_max"]) < 2e-5
    assert float(metrics["ratio_max"]) == float(metrics["ratio_min"]) == 1.0


def test_bfloat16_keeps_log_probabilities_within_a_bound() -> None:
    """Activations and caches of 8 bits, sums and weights of float32; the sampler adds in another order."""
    half = Decoder(dataclasses.replace(DECODER, compute_dtype="bfloat16"))
    sample = rollout(model=half)
    config, batch, mask = make_config(), batch_of(sample), np.asarray(sample.completion_mask_PGT)
    logps, entropy = jax.jit(make_step(config).logps)(params(), batch)
    step = TrainStep(half, make_optimizer(config.optimizer, 100), config, KNOWN)
    half_logps, half_entropy = jax.jit(step.logps)(params(), batch)
    assert half_logps.dtype == jnp.float32
    for a, b in ((half_logps, logps), (half_entropy, entropy), (half_logps, sample.sampler_logps_PGT)):
        a, b = np.asarray(a)[mask], np.asarray(b)[mask]
        # An activation errs by 2**-9 of its size, a logit by some dozens of them: by 2**-5 of the largest.
        assert np.abs(a - b).max() < 2**-5 * np.abs(np.asarray(logps)[mask]).max()
        assert np.abs(a - b).mean() < 0.02
    state, _ = jax.jit(step.train_step)(start(config), batch)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.params))


def test_importance_weights_undo_a_truncated_sampler() -> None:
    """Kept mass m: the sampler's log-probability is the policy's minus log m, so the weight is m."""
    sample = rollout(1.0, 0.6)
    config = dataclasses.replace(make_config(), rollout=dataclasses.replace(make_config().rollout, top_p=0.6))
    step = make_step(config)
    logps_PGT, _ = jax.jit(step.logps)(params(), batch_of(sample))
    mask = np.asarray(sample.completion_mask_PGT)
    weights = np.exp(np.asarray(logps_PGT - sample.sampler_logps_PGT))[mask]
    assert (weights > 0.6 - 1e-4).all() and (weights < 1 + 1e-4).all() and weights.min() < 0.95
    _, metrics = jax.jit(step.train_step)(start(config), batch_of(sample))
    assert abs(float(metrics["importance"]) - weights.mean()) < 1e-5
    off = dataclasses.replace(config, objective=ObjectiveConfig(importance="none"))
    _, without = jax.jit(make_step(off).train_step)(start(off), batch_of(sample))
    assert "importance" not in without and abs(float(without["loss"] - metrics["loss"])) > 1e-3


@pytest.mark.parametrize(
    ("aggregate", "prompt_parts", "group_parts"),
    [("token_mean", 8, 1), ("sequence_mean", 2, 2), ("constant", 1, 4), ("token_mean", 2, 2)],
)
def test_micro_batches_leave_the_update_unchanged(aggregate: str, prompt_parts: int, group_parts: int) -> None:
    config = make_config(aggregate=aggregate, beta=0.1, entropy_coef=0.01)
    ref_logps = rollout().sampler_logps_PGT - 0.2
    batch = batch_of(rollout(), ref_logps_PGT=ref_logps)
    whole, metrics = jax.jit(make_step(config).train_step)(start(config), batch)
    split = with_train(config, prompt_micro_batches=prompt_parts, group_micro_batches=group_parts)
    parts, parts_metrics = jax.jit(make_step(split).train_step)(start(split), batch)
    # Gradients of order 1, summed in another order in float32: 2.5e-6 has been seen.
    assert_trees_close(whole.params, parts.params, atol=1e-5)
    assert metrics.keys() == parts_metrics.keys()
    for name, value in metrics.items():
        if name.startswith("sampler_gap"):
            assert value < 2e-5 and parts_metrics[name] < 2e-5  # rounding alone, other in each layout
            continue
        np.testing.assert_allclose(value, parts_metrics[name], rtol=2e-4, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    "mesh_config",
    [
        MeshConfig(data=2, fsdp=1, group=1, tensor=1),
        MeshConfig(data=2, fsdp=2, group=2, tensor=1),
        MeshConfig(data=1, fsdp=2, group=2, tensor=2),
    ],
)
def test_devices_leave_the_update_unchanged(mesh_config: MeshConfig) -> None:
    config = with_train(make_config(), prompt_micro_batches=2)
    expected, metrics = jax.jit(make_step(config).train_step)(start(config), batch_of(rollout()))
    sizes = dataclasses.astuple(mesh_config)
    mesh = make_mesh(mesh_config, jax.devices()[: int(np.prod(sizes))])

    def place(path: Any, x: jax.Array) -> jax.Array:
        axes = PROMPT_AXES if path[0].name.startswith("prompt") else GROUP_AXES
        return jax.device_put(x, jax.NamedSharding(mesh, partition_spec(axes)))

    batch = jax.tree.map_with_path(place, batch_of(rollout()))
    weights = place_params(params(), logical_axes(DECODER), mesh)
    with jax.set_mesh(mesh):
        result, mesh_metrics = jax.jit(make_step(config).train_step)(start(config, weights), batch)
    assert_trees_close(expected.params, result.params, atol=1e-5)  # as for micro-batches
    np.testing.assert_allclose(metrics["loss"], mesh_metrics["loss"], rtol=1e-4)


def test_the_step_is_the_written_out_update() -> None:
    """One step against jax.grad of the plain on-policy objective and Optax, without any of the step's code."""
    config = make_config(aggregate="token_mean")
    batch = batch_of(rollout())

    prompts = [ids[mask].tolist() for ids, mask in zip(batch.prompt_PS, batch.prompt_mask_PS, strict=True)]
    tokens_NT = np.asarray(batch.completion_PGT).reshape(P * G, T)
    mask_NT = np.asarray(batch.loss_mask_PGT).reshape(P * G, T)
    # Every token is predicted by a forward pass of its own over all that stands before it.
    before = [
        pad_left([prompts[n // G] + tokens_NT[n, :t].tolist() for n in range(P * G)], S + T, 0) for t in range(T)
    ]

    def plain(weights: Params) -> jax.Array:
        total = 0.0
        for t, (ids, mask) in enumerate(before):
            hidden_ND = MODEL.prefill(weights, jnp.asarray(ids), jnp.asarray(mask)).hidden_PD
            logps_NV = jax.nn.log_softmax((hidden_ND @ MODEL.head(weights).T)[:, :KNOWN])
            logps_N = logps_NV[jnp.arange(P * G), tokens_NT[:, t]]
            total += (batch.advantages_PG.reshape(-1) * logps_N * mask_NT[:, t]).sum()
        return -total / mask_NT.sum()

    grads = jax.jit(jax.grad(plain))(params())
    expected = jax.tree.map(lambda weight, grad: weight - grad, params(), grads)
    result, metrics = jax.jit(make_step(config).train_step)(start(config), batch)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-4)
    assert_trees_close(expected, result.params, atol=1e-5)  # as for micro-batches


def test_several_updates_of_a_batch_use_its_old_policy() -> None:
    config = with_train(make_config(), updates_per_batch=3)
    step = make_step(config)
    old, _ = jax.jit(step.score)(params(), batch_of(rollout()))
    state, metrics = jax.jit(step.train_step)(start(config), batch_of(rollout(), old_logps_PGT=old))
    assert int(state.step) == 1 and int(optax.tree.get(state.opt_state, "count")) == 3
    assert float(metrics["ratio_max"]) > 1.0001, "from the second update on the policy differs from the old one"
    assert float(metrics["sampler_gap_max"]) < 2e-5, "the gap is measured before the first update"


def test_score_equals_logps_however_it_is_split() -> None:
    config = with_train(make_config(), prompt_micro_batches=2, group_micro_batches=2)
    scored = jax.jit(make_step(config).score)(params(), rollout())
    logps_and_entropy = jax.jit(make_step(config).logps)(params(), batch_of(rollout()))
    assert_trees_close(scored, logps_and_entropy, atol=1e-5)  # float32 sums in another order


@pytest.mark.parametrize("update", ["fixed", "sync", "polyak"])
def test_the_reference_moves_as_configured(update: str) -> None:
    config = dataclasses.replace(
        make_config(beta=0.1),
        reference=ReferenceConfig(update=update, sync_every=2, polyak_rate=0.25),  # type: ignore[arg-type]
    )
    step = jax.jit(make_step(config).train_step)
    state = start(config)
    batch = batch_of(rollout(), ref_logps_PGT=rollout().sampler_logps_PGT)
    first, _ = step(state, batch)
    second, _ = step(first, batch)
    expected = {
        "fixed": params(),
        "sync": second.params,
        "polyak": jax.tree.map(
            lambda ref, one, two: 0.75 * (0.75 * ref + 0.25 * one) + 0.25 * two,
            params(),
            first.params,
            second.params,
        ),
    }[update]
    for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(second.ref_params), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)  # float32 averages
    if update == "sync":
        assert_trees_close(params(), first.ref_params, atol=0)


@pytest.mark.slow
def test_a_step_against_a_reference_lowers_the_kl() -> None:
    """With all advantages 0, only the KL term acts, and it must pull the policy towards the reference."""
    config = dataclasses.replace(make_config(beta=1.0), optimizer=OptimizerConfig(learning_rate=3e-5))
    step = make_step(config)
    reference = jax.tree.map(lambda x: x * 0.9, params())
    ref_logps, _ = jax.jit(step.score)(reference, batch_of(rollout()))
    batch = batch_of(rollout(), ref_logps_PGT=ref_logps, advantages_PG=jnp.zeros((P, G)))
    state = start(config)
    kls = []
    for _ in range(5):
        state, metrics = jax.jit(step.train_step)(state, batch)
        kls.append(float(metrics["kl"]))
    assert kls == sorted(kls, reverse=True) and kls[-1] < 0.95 * kls[0]


def test_non_finite_gradients_are_skipped_and_counted() -> None:
    config = make_config()
    step = jax.jit(make_step(config).train_step)
    state = start(config)
    bad = batch_of(rollout(), advantages_PG=jnp.full((P, G), jnp.inf))
    after_bad, metrics = step(state, bad)
    assert_trees_close(state.params, after_bad.params, atol=0)
    assert_trees_close(state.opt_state.inner_state, after_bad.opt_state.inner_state, atol=0)
    assert int(metrics["nonfinite_in_a_row"]) == int(metrics["nonfinite_total"]) == 1
    _, metrics = step(after_bad, batch_of(rollout()))
    assert int(metrics["nonfinite_in_a_row"]) == 0 and int(metrics["nonfinite_total"]) == 1


def test_equal_rewards_leave_the_weights_alone() -> None:
    config = make_config()
    state, metrics = jax.jit(make_step(config).train_step)(
        start(config), batch_of(rollout(), advantages_PG=jnp.zeros((P, G)))
    )
    assert float(metrics["grad_norm"]) == 0.0
    assert_trees_close(params(), state.params, atol=0)


@functools.cache
def logps_of(scale: float) -> jax.Array:
    """Log-probabilities of another policy, whose weights are ``scale`` times these."""
    return jax.jit(make_step(make_config()).score)(jax.tree.map(lambda x: x * scale, params()), rollout())[0]


SELECTIONS = [
    {"top_entropy": 0.3},
    {"surrogate": "clip_cov", "cov_share": 0.2, "cov_low": 0.0, "cov_high": 1e6},
    {"surrogate": "kl_cov", "cov_share": 0.1},
]


@pytest.mark.slow
@pytest.mark.parametrize("objective", SELECTIONS, ids=lambda o: o.get("surrogate", "top_entropy"))
def test_tokens_are_selected_from_the_whole_batch_whatever_the_micro_batches(objective: dict[str, Any]) -> None:
    """Ranked within each micro-batch, other tokens would be picked."""
    batch = batch_of(rollout(), old_logps_PGT=logps_of(0.9))
    states = []
    for parts in (1, 4):
        config = with_train(make_config(**objective), prompt_micro_batches=parts)
        state, metrics = jax.jit(make_step(config).train_step)(start(config), batch)
        states.append(state.params)
        assert float(metrics["grad_norm"]) > 0
    plain, _ = jax.jit(make_step(make_config()).train_step)(start(make_config()), batch)
    # float32 sums of gradients in another order.
    assert_trees_close(states[0], states[1], atol=2e-5)
    apart = max(
        float(jnp.abs(x - y).max()) for x, y in zip(*map(jax.tree.leaves, (states[0], plain.params)), strict=True)
    )
    assert apart > 1e-3, "the selection must matter"


def test_every_choice_of_the_objective_reaches_the_loss() -> None:
    """The step's loss is grpo_loss with each of the config's settings."""
    settings: dict[str, Any] = {
        "surrogate": "clip", "ratio": "token", "clip_low": 0.01, "clip_high": 0.02, "delta": 1.05,
        "dual_clip": 1.04,
        "aggregate": "sequence_sum", "beta": 0.3, "kl_estimator": "k1", "kl_unbiased": True, "entropy_coef": 0.2,
        "importance": "sequence", "importance_outside": "drop", "importance_low": 0.9, "importance_cap": 1.1,
    }  # fmt: skip
    config = make_config(**settings)
    step = make_step(config)
    old, ref = logps_of(0.95), logps_of(0.9)
    batch = batch_of(rollout(), old_logps_PGT=old, ref_logps_PGT=ref)
    _, metrics = jax.jit(step.train_step)(start(config), batch)
    new, entropy = jax.jit(step.score)(params(), rollout())
    mask = batch.loss_mask_PGT
    weights, weight_metrics = importance_weights(
        old, batch.sampler_logps_PGT, mask, level="sequence", outside="drop", low=0.9, cap=1.1
    )
    names = (
        "surrogate",
        "ratio",
        "clip_low",
        "clip_high",
        "delta",
        "dual_clip",
        "aggregate",
        "beta",
        "kl_estimator",
    )
    expected, _ = grpo_loss(
        new, batch.advantages_PG, mask, old_logps_PGT=old, ref_logps_PGT=ref, entropy_PGT=entropy,
        importance_weights_PGT=weights, kl_unbiased=True, entropy_coef=0.2, **{n: settings[n] for n in names},
    )  # fmt: skip
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-4)  # float32, compiled another way
    for name, value in weight_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, err_msg=name)
    assert 0 < float(metrics["importance_dropped"]) < 1


@pytest.mark.parametrize(
    "objective",
    [
        {"surrogate": "cispo", "cispo_low": 0.97, "cispo_high": 1.01},
        {"surrogate": "sapo", "tau_pos": 2.0, "tau_neg": 3.0},
        {"surrogate": "gmpo", "gmpo_range": 0.01, "aggregate": "sequence_mean"},
        {"surrogate": "clip", "ratio": "trajectory", "aggregate": "sequence_mean"},
        {"surrogate": "kl_cov", "cov_share": 0.5, "kl_cov_coef": 3.0},
    ],
    ids=lambda o: f"{o['surrogate']}-{o.get('ratio', 'token')}",
)
def test_options_of_a_surrogate_reach_the_loss(objective: dict[str, Any]) -> None:
    config = make_config(**objective)
    step = make_step(config)
    old = logps_of(0.95)
    batch = batch_of(rollout(), old_logps_PGT=old)
    _, metrics = jax.jit(step.train_step)(start(config), batch)
    new = logps_of(1.0)
    expected, _ = policy_loss(new, old, batch.advantages_PG, batch.loss_mask_PGT, **objective)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-4, atol=1e-6)  # float32, compiled another way
    default, _ = policy_loss(
        new, old, batch.advantages_PG, batch.loss_mask_PGT, aggregate=config.objective.aggregate
    )
    assert abs(float(expected) - float(default)) > 1e-3
