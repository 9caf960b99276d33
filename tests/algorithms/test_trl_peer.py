"""The objective against TRL's own functions, where TRL and PyTorch can be imported.

TRL's loss and advantages are methods of a trainer. Here they run on an object that has the attributes they read
and, instead of a model, a function that hands out our arrays.
"""

from __future__ import annotations

import dataclasses
import types
import warnings
from collections import defaultdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.algorithms.advantages import combine_rewards, group_advantages
from grpo_jax.algorithms.importance import importance_weights
from grpo_jax.algorithms.objectives import grpo_loss
from grpo_jax.algorithms.selection import top_entropy_tokens

pytest.importorskip("trl")

P, G, T = 6, 5, 7
MAX_COMPLETION_LENGTH = 9
SEEDS = range(4)
# float32 on both sides: sums of some 200 terms of order 1, in another order, of numbers that exp has rounded.
CLOSE = {"rtol": 2e-5, "atol": 2e-7}

# Options of TRL's configuration, and those of ours that mean the same.
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "bnpo": ({"loss_type": "bnpo"}, {}),
    "grpo": ({"loss_type": "grpo"}, {"aggregate": "sequence_mean"}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"aggregate": "constant"}),
    "luspo": (
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"aggregate": "sequence_sum", "ratio": "sequence"},
    ),
    "luspo of tokens": ({"loss_type": "luspo"}, {"aggregate": "sequence_sum"}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.03, "epsilon_high": 0.04},
        {"aggregate": "sequence_mean", "ratio": "sequence", "clip_low": 0.03, "clip_high": 0.04},
    ),
    "gspo by token": ({"importance_sampling_level": "sequence"}, {"ratio": "sequence"}),
    "clip higher": ({"epsilon": 0.1, "epsilon_high": 0.28}, {"clip_low": 0.1, "clip_high": 0.28}),
    "two-sided": ({"delta": 1.3}, {"delta": 1.3}),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.2}, {"surrogate": "cispo", "cispo_high": 1.2}),
    "cispo of sequences": (
        {"loss_type": "cispo", "epsilon_high": 1.05, "importance_sampling_level": "sequence"},
        {"surrogate": "cispo", "cispo_high": 1.05, "ratio": "sequence"},
    ),
    "sapo": ({"loss_type": "sapo"}, {"surrogate": "sapo", "aggregate": "sequence_mean"}),
    "sapo of sequences": (
        {"loss_type": "sapo", "importance_sampling_level": "sequence", "sapo_temperature_pos": 2.0},
        {"surrogate": "sapo", "aggregate": "sequence_mean", "ratio": "sequence", "tau_pos": 2.0},
    ),
    "kl": ({"beta": 0.2, "use_bias_correction_kl": False}, {"beta": 0.2}),
    "unbiased kl": ({"beta": 0.2}, {"beta": 0.2, "kl_unbiased": True}),
    "unbiased kl, grpo": (
        {"loss_type": "grpo", "beta": 0.2},
        {"aggregate": "sequence_mean", "beta": 0.2, "kl_unbiased": True},
    ),
    "top entropy": (
        {"top_entropy_quantile": 0.25, "beta": 0.2, "use_bias_correction_kl": False},
        {"top_entropy": 0.25, "beta": 0.2},
    ),
    # Elsewhere TRL takes the mean of the entropy over tokens, and we aggregate it as we do the loss.
    "entropy bonus": ({"entropy_coef": 0.1}, {"entropy_coef": 0.1}),
}

# How TRL scales rewards -> the estimator of ours.
ADVANTAGES = {"group": "group", "none": "center", "batch": "batch_std"}

# How TRL corrects for a sampler that is not the policy -> level and outside of ours.
CORRECTIONS = {
    "token_truncate": ("token", "truncate"),
    "token_mask": ("token", "drop"),
    "sequence_truncate": ("sequence", "truncate"),
    "sequence_mask": ("sequence", "drop"),
}


class Batch(NamedTuple):
    """``[P, G, T]`` float32, but for the names that say otherwise."""

    new: np.ndarray
    old: np.ndarray
    ref: np.ndarray
    sampler: np.ndarray
    entropy: np.ndarray
    weights: np.ndarray
    mask: np.ndarray
    advantages_PG: np.ndarray


def random_batch(seed: int) -> Batch:
    """Ratios on both sides of the clip range; every completion has a token.

    (One without any is no completion here; TRL counts it in the denominators of "grpo", "dr_grpo" and "luspo".)
    """
    rng = np.random.default_rng(seed)
    new = -rng.exponential(1.0, (P, G, T))
    batch = Batch(
        new=new,
        old=new + rng.normal(0, 0.3, new.shape),
        ref=new + rng.normal(0, 0.5, new.shape),
        sampler=new + rng.normal(0, 0.4, new.shape),
        entropy=rng.exponential(1.0, new.shape),
        weights=rng.uniform(0.2, 2.0, new.shape),
        mask=np.arange(T) < rng.integers(1, T + 1, (P, G, 1)),
        advantages_PG=rng.normal(0, 1, (P, G)),
    )
    return Batch(*(x if x.dtype == bool else x.astype(np.float32) for x in batch))


def defaults() -> dict[str, Any]:
    """TRL's default configuration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl import GRPOConfig
    return {field.name: field.default for field in dataclasses.fields(GRPOConfig)}


class Trainer(types.SimpleNamespace):
    """Stands for a trainer of TRL: one process, the attributes that its loss and advantages read, no model."""

    def __init__(self, **options: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
            from trl import GRPOTrainer

        config = defaults()
        assert set(options) <= set(config), f"unknown to TRL: {set(options) - set(config)}"
        # What their configuration works out when it is made.
        config |= {"steps_per_generation": 1, "gradient_accumulation_steps": 1, "pad_to_multiple_of": None}
        config |= options
        super().__init__(**config)
        self.theirs = GRPOTrainer
        self.args = types.SimpleNamespace(**config)
        self.epsilon_low = self.epsilon
        self.epsilon_high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        self.max_completion_length = MAX_COMPLETION_LENGTH
        self.current_gradient_accumulation_steps = self.gradient_accumulation_steps
        self.num_generations = G
        self.model = types.SimpleNamespace(training=True, is_gradient_checkpointing=False)
        self.accelerator = types.SimpleNamespace(
            device=torch.device("cpu"),
            num_processes=1,
            process_index=0,
            sync_gradients=True,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            pad_across_processes=lambda x, dim, pad_index: x,
        )
        self.aux_loss_enabled = self.use_adaptive_entropy = False
        self._entropy_bonus_enabled = self.entropy_coef != 0
        self.environment_factories = self.environments = self.tools = None
        self.eos_token_ids, self._tokenizer = [-1], types.SimpleNamespace(pad_token_id=-2)
        self._metrics = {"train": defaultdict(list)}
        self._logs = defaultdict(list) | {"rewards": defaultdict(list)}
        self._pending_extra_logs, self._pending_metrics = {}, {}

    def get_high_entropy_mask(self, *args: Any) -> Any:
        return self.theirs.get_high_entropy_mask(self, *args)

    def loss_and_gradient(self, batch: Batch, *, num_items: int | None = None) -> tuple[float, np.ndarray]:
        """TRL's loss, and its gradient for the new log-probabilities ``[P, G, T]``."""
        import torch

        rows = Batch(*(torch.tensor(x.reshape(-1, *x.shape[2:])) for x in batch))
        leaf = rows.new.requires_grad_()
        self._get_per_token_logps_and_entropies = lambda *args, **kwargs: (leaf, rows.entropy, None)
        inputs = {
            "prompt_ids": torch.zeros(len(leaf), 1),
            "prompt_mask": torch.ones(len(leaf), 1),
            "completion_ids": torch.zeros(leaf.shape),
            "completion_mask": rows.mask.int(),
            "advantages": rows.advantages_PG,
            "num_items_in_batch": rows.mask.sum() if num_items is None else torch.tensor(num_items),
            "old_per_token_logps": rows.old,
            "ref_per_token_logps": rows.ref,
            "importance_sampling_ratio": rows.weights,
        }
        loss = self.theirs._compute_loss(self, None, inputs)
        loss.backward()
        return loss.item(), leaf.grad.numpy().reshape(batch.new.shape)

    def score(self, rewards_PGK: np.ndarray, batch: Batch, weights_K: np.ndarray | None = None) -> dict[str, Any]:
        """What TRL makes of a generated batch: advantages, weights for the sampler's mismatch."""
        import torch

        num_rewards = rewards_PGK.shape[-1]
        rewards = torch.tensor(rewards_PGK.reshape(-1, num_rewards))
        lengths = batch.mask.sum(axis=-1).ravel().tolist()
        sampler = [row[:n].tolist() for row, n in zip(batch.sampler.reshape(-1, T), lengths, strict=True)]
        tokens = [[0] * n for n in lengths]
        # TRL pads to the longest completion.
        longest = max(lengths)
        old = torch.tensor(batch.old.reshape(-1, T)[:, :longest])
        self.reward_funcs = self.reward_func_names = [f"r{k}" for k in range(num_rewards)]
        self.reward_weights = torch.tensor(np.ones(num_rewards, np.float32) if weights_K is None else weights_K)
        self._get_per_token_logps_and_entropies = lambda *args, **kwargs: (old, None, None)
        self._calculate_rewards = lambda *args: rewards
        self._generate = lambda prompts: ([[0]] * len(tokens), tokens, None, tokens, sampler, {}, None, [])
        inputs = [{"prompt": ""}] * len(tokens)
        output = self.theirs._generate_and_score_completions(self, inputs)
        return {name: value.numpy() for name, value in output.items()}


def our_loss_and_gradient(batch: Batch, **options: Any) -> tuple[float, np.ndarray]:
    """Ours, float32; ``top_entropy`` is the share of tokens whose surrogate counts."""
    share = options.pop("top_entropy", None)

    def loss(new: jax.Array) -> jax.Array:
        return grpo_loss(
            new,
            jnp.asarray(batch.advantages_PG),
            jnp.asarray(batch.mask),
            old_logps_PGT=jnp.asarray(batch.old),
            ref_logps_PGT=jnp.asarray(batch.ref),
            entropy_PGT=jnp.asarray(batch.entropy),
            policy_mask_PGT=None if share is None else top_entropy_tokens(batch.entropy, batch.mask, share=share),
            max_completion_length=MAX_COMPLETION_LENGTH,
            **options,
        )[0]

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(batch.new))
    return float(value), np.asarray(gradient)


def assert_same(theirs: tuple[float, np.ndarray], ours: tuple[float, np.ndarray]) -> None:
    assert np.abs(theirs[1]).max() > 1e-3, "nothing to compare"
    np.testing.assert_allclose(ours[0], theirs[0], **CLOSE)
    np.testing.assert_allclose(ours[1], theirs[1], **CLOSE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient(name: str, seed: int) -> None:
    trl_options, our_options = LOSSES[name]
    batch = random_batch(seed)
    assert_same(Trainer(**trl_options).loss_and_gradient(batch), our_loss_and_gradient(batch, **our_options))


def test_every_case_is_another_loss() -> None:
    """An option that either side ignored would make two cases equal."""
    batch = random_batch(0)
    losses = {name: our_loss_and_gradient(batch, **options)[0] for name, (_, options) in LOSSES.items()}
    assert losses.pop("bnpo") == losses["default"]  # in one batch they mean the same
    assert len({round(loss, 6) for loss in losses.values()}) == len(losses)


@pytest.mark.parametrize("name", ["default", "grpo", "dr_grpo", "cispo", "luspo"])
def test_accumulation_over_two_batches_of_equal_size(name: str) -> None:
    """TRL's losses of two accumulated halves sum to our loss of the whole."""
    trl_options, our_options = LOSSES[name]
    batch = random_batch(0)
    trainer = Trainer(**trl_options, steps_per_generation=2, gradient_accumulation_steps=2)
    halves = [Batch(*(x[part] for x in batch)) for part in (slice(P // 2), slice(P // 2, None))]
    results = [trainer.loss_and_gradient(half, num_items=int(batch.mask.sum())) for half in halves]
    theirs = sum(loss for loss, _ in results), np.concatenate([gradient for _, gradient in results])
    assert_same(theirs, our_loss_and_gradient(batch, **our_options))


@pytest.mark.parametrize("name", ["default", "grpo", "gspo"])
def test_importance_weights_in_the_loss(name: str) -> None:
    trl_options, our_options = LOSSES[name]
    batch = random_batch(0)
    theirs = Trainer(**trl_options, use_vllm=True).loss_and_gradient(batch)
    assert_same(theirs, our_loss_and_gradient(batch, importance_weights_PGT=batch.weights, **our_options))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", CORRECTIONS)
def test_importance_weights(mode: str, seed: int) -> None:
    level, outside = CORRECTIONS[mode]
    batch, low, cap = random_batch(seed), 0.7, 1.5
    options = {"vllm_importance_sampling_clip_max": cap}
    if outside == "drop":
        options["vllm_importance_sampling_clip_min"] = low
    trainer = Trainer(use_vllm=True, vllm_importance_sampling_mode=mode, **options)
    theirs = trainer.score(random_rewards(seed)[..., None], batch)["importance_sampling_ratio"]
    ours, _ = importance_weights(
        batch.old, batch.sampler, batch.mask, level=level, outside=outside, low=low, cap=cap
    )
    longest = batch.mask.sum(axis=-1).max()
    theirs = np.broadcast_to(theirs, (P * G, longest)).reshape(P, G, longest)
    mask = batch.mask[..., :longest]
    assert (theirs[mask] == (cap if outside == "truncate" else 0)).any()
    # exp of sums of up to 7 rounded differences.
    np.testing.assert_allclose(np.asarray(ours)[..., :longest][mask], theirs[mask], rtol=1e-6)


def random_rewards(seed: int) -> np.ndarray:
    """``[P, G]`` float32: the first group without spread, the second with a single reward, others lack some."""
    rng = np.random.default_rng(seed)
    rewards_PG = rng.choice([0.0, 0.5, 1.0, 0.7], (P, G)).astype(np.float32)
    rewards_PG[0] = 0.7
    rewards_PG[1, 1:] = np.nan
    rewards_PG[2, rng.integers(G)] = np.nan
    return rewards_PG


def assert_same_advantages(ours_PG: Any, theirs_N: np.ndarray) -> None:
    ours_PG, theirs_PG = np.asarray(ours_PG), theirs_N.reshape(P, G)
    # Of a group without spread, TRL divides what rounding left of the mean (6e-8 of it) by 1e-4.
    assert (ours_PG[0] == 0).all() and (np.abs(theirs_PG[0]) < 2e-2).all()
    # Differences of rewards of at most 10, in float32, over spreads of 0.1 and more.
    np.testing.assert_allclose(ours_PG[1:], theirs_PG[1:], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scale", ADVANTAGES)
def test_advantages(scale: str, seed: int) -> None:
    rewards_PG = random_rewards(seed)
    theirs = Trainer(scale_rewards=scale).score(rewards_PG[..., None], random_batch(seed))["advantages"]
    assert_same_advantages(group_advantages(rewards_PG, estimator=ADVANTAGES[scale]), theirs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("method", ["sum_then_normalize", "normalize_then_sum"])
def test_advantages_of_several_rewards(method: str, seed: int) -> None:
    rewards_PGK = np.stack([random_rewards(seed), 10 * random_rewards(seed + 100)], axis=-1)
    weights_K = np.array([1.0, 0.3], np.float32)
    trainer = Trainer(multi_objective_aggregation=method)
    theirs = trainer.score(rewards_PGK, random_batch(seed), weights_K)["advantages"]
    assert_same_advantages(combine_rewards(rewards_PGK, weights_K, method=method), theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_preset_is_their_default(seed: int) -> None:
    """What a TRL run does that sets nothing is what the preset "trl" does."""
    from grpo_jax.algorithms.presets import PRESETS

    objective = PRESETS["trl"].objective
    names = ("surrogate", "ratio", "clip_low", "clip_high", "delta", "dual_clip", "aggregate")
    options = {name: getattr(objective, name) for name in (*names, "beta", "kl_estimator", "entropy_coef")}
    batch = random_batch(seed)
    assert objective.top_entropy == 1
    assert_same(Trainer().loss_and_gradient(batch), our_loss_and_gradient(batch, **options))
    rewards_PG = random_rewards(seed)
    ours = group_advantages(
        rewards_PG,
        estimator=objective.advantage,
        eps=objective.advantage_eps,
        ddof=objective.advantage_ddof,
    )
    assert_same_advantages(ours, Trainer().score(rewards_PG[..., None], batch)["advantages"])
