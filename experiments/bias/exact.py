"""Exact moments of a loss's gradient, over every batch that a small tabular policy can sample.

Shapes: P prompts, G completions of a prompt, T tokens, C possible completions, S states (the tokens so far), V
vocabulary, B possible batches, K parameters of a prompt (its S x V logits), L aggregates. All is float64: enable
x64 around it.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.algorithms.advantages import group_advantages
from grpo_jax.algorithms.aggregates import AGGREGATES, loss_denominator
from grpo_jax.algorithms.objectives import grpo_loss
from grpo_jax.types import Array

Logits = Array | np.ndarray

VOCAB_SIZE = 3
END = 0  # the token that ends a completion


class Tree(NamedTuple):
    """Every completion, padded: it ends with the first END or at the length limit; shorter ones come first."""

    tokens_CT: np.ndarray
    states_CT: np.ndarray
    """Index of the tokens before each token."""
    mask_CT: np.ndarray
    num_states: int


def completion_tree(max_length: int) -> Tree:
    """All completions of at most ``max_length`` tokens."""
    states: dict[tuple[int, ...], int] = {}
    finished: list[tuple[int, ...]] = []
    alive: list[tuple[int, ...]] = [()]
    for _ in range(max_length):
        states |= {prefix: len(states) + i for i, prefix in enumerate(alive)}
        longer = [(*prefix, token) for prefix in alive for token in range(VOCAB_SIZE)]
        finished += [completion for completion in longer if completion[-1] == END]
        alive = [completion for completion in longer if completion[-1] != END]
    completions = finished + alive
    shape = (len(completions), max_length)
    tree = Tree(np.zeros(shape, int), np.zeros(shape, int), np.zeros(shape, bool), len(states))
    for c, completion in enumerate(completions):
        for t, token in enumerate(completion):
            tree.tokens_CT[c, t], tree.states_CT[c, t], tree.mask_CT[c, t] = token, states[completion[:t]], True
    return tree


@dataclass(frozen=True)
class World:
    """A policy whose parameters are the logits of P prompts, who samples for it, and what is rewarded."""

    tree: Tree
    policy_PSV: np.ndarray
    sampler_PSV: np.ndarray
    """Logits of the policy that sampled, ``old``; on-policy they're the policy's."""
    reference_PSV: np.ndarray
    rewards_PC: np.ndarray

    def logps_PCT(self, logits_PSV: Logits) -> Array:
        """Log-probability of each token of each completion; 0 in the padding."""
        logps_PSV = jax.nn.log_softmax(logits_PSV)
        return jnp.where(self.tree.mask_CT[None], logps_PSV[:, self.tree.states_CT, self.tree.tokens_CT], 0.0)

    def probabilities_PC(self, logits_PSV: Logits) -> Array:
        """Probability of each completion."""
        return jnp.exp(self.logps_PCT(logits_PSV).sum(axis=-1))

    def expected_reward(self, logits_PSV: Logits) -> Array:
        """E[r], mean over the prompts."""
        return (self.probabilities_PC(logits_PSV) * self.rewards_PC).sum(axis=-1).mean()

    def sequence_kl(self, logits_PSV: Logits) -> Array:
        """KL(policy || reference) of whole completions, mean over the prompts."""
        log_ratio_PC = (self.logps_PCT(logits_PSV) - self.logps_PCT(self.reference_PSV)).sum(axis=-1)
        return (self.probabilities_PC(logits_PSV) * log_ratio_PC).sum(axis=-1).mean()

    def token_kl(self, logits_PSV: Logits) -> Array:
        """Sum over tokens of KL(policy || reference) in the states that the sampler visits, held constant."""
        logps_PSV, ref_PSV = jax.nn.log_softmax(logits_PSV), jax.nn.log_softmax(self.reference_PSV)
        kl_PS = (jnp.exp(logps_PSV) * (logps_PSV - ref_PSV)).sum(axis=-1)
        kl_PC = (kl_PS[:, self.tree.states_CT] * self.tree.mask_CT[None]).sum(axis=-1)
        return (self.probabilities_PC(self.sampler_PSV) * kl_PC).sum(axis=-1).mean()


class Moments(NamedTuple):
    """Mean of a gradient over all batches, and the trace of its covariance."""

    mean_PK: np.ndarray
    variance: float


class Batches:
    """Every batch that the sampler can draw, seen from one prompt, with its probability.

    Equal groups in another order are one. The other prompts' completions reach this prompt's gradient through
    their rewards and lengths alone, so that those equal in both stand for each other.
    """

    def __init__(self, world: World, prompt: int, *, group_size: int) -> None:
        mask_CT, lengths_C = world.tree.mask_CT, world.tree.mask_CT.sum(axis=-1)
        groups, weights = [], []
        for p, probability_C in enumerate(np.asarray(world.probabilities_PC(world.sampler_PSV))):
            if p != prompt:
                probability_C = _merge(probability_C, np.stack([world.rewards_PC[p], lengths_C]))
            possible = np.flatnonzero(probability_C)
            groups.append(list(itertools.combinations_with_replacement(possible, group_size)))
            weights.append([_probability(group, probability_C) for group in groups[-1]])
        index_BPG = np.array(list(itertools.product(*groups)))
        rows_BPG = (np.arange(len(groups))[None, :, None], index_BPG)
        self.prompt = prompt
        self.weights_B = np.array([math.prod(row) for row in itertools.product(*weights)])
        self.rewards_BPG = world.rewards_PC[rows_BPG]
        self.mask_BPGT = mask_CT[index_BPG]
        # The prompt's own completions: as a micro-batch, P = 1.
        self.logps_B1GT, self.old_B1GT, self.ref_B1GT = (
            np.asarray(world.logps_PCT(logits))[prompt, index_BPG[:, [prompt]]]
            for logits in (world.policy_PSV, world.sampler_PSV, world.reference_PSV)
        )
        # A loss is differentiated in its log-probabilities; these, here, in the prompt's logits.
        policy_SV = np.exp(np.asarray(jax.nn.log_softmax(world.policy_PSV[prompt])))
        state_CTS = np.eye(world.tree.num_states)[world.tree.states_CT] * mask_CT[..., None]
        token_CTV = np.eye(VOCAB_SIZE)[world.tree.tokens_CT]
        scores_CTSV = state_CTS[..., None] * (token_CTV[:, :, None] - policy_SV)
        self.scores_BGTK = scores_CTSV.reshape(*mask_CT.shape, -1)[index_BPG[:, prompt]]

    def advantages(self, estimator: str, rewards_BPG: np.ndarray | None = None) -> np.ndarray:
        """:func:`~grpo_jax.algorithms.advantages.group_advantages` of every batch, those of the prompt."""
        rewards_BPG = self.rewards_BPG if rewards_BPG is None else rewards_BPG
        advantages_BPG = advantages(rewards_BPG, self.mask_BPGT.sum(axis=-1), estimator=estimator)
        return np.asarray(advantages_BPG)[:, [self.prompt]]

    def gradients_LBK(self, advantages_B1G: np.ndarray, **options: Any) -> np.ndarray:
        """Of :func:`~grpo_jax.algorithms.objectives.grpo_loss` in the prompt's logits, for each of AGGREGATES."""
        own_B1GT = self.mask_BPGT[:, [self.prompt]]
        arrays = (self.logps_B1GT, advantages_B1G, own_B1GT, self.old_B1GT, self.ref_B1GT, self.mask_BPGT)
        slopes_BL1GT = np.asarray(_slopes(*arrays, **options))
        return np.einsum("blgt,bgtk->lbk", slopes_BL1GT[:, :, 0], self.scores_BGTK)


def moments(batches_P: list[Batches], advantages_P: list[np.ndarray], **options: Any) -> dict[str, Moments]:
    """Moments of the whole gradient by aggregate, found prompt by prompt: each has parameters of its own."""
    means_P, squares_L = [], 0.0
    for batches, advantages_B1G in zip(batches_P, advantages_P, strict=True):
        gradients_LBK = batches.gradients_LBK(advantages_B1G, **options)
        means_P.append(np.einsum("b,lbk->lk", batches.weights_B, gradients_LBK))
        squares_L += np.einsum("b,lbk,lbk->l", batches.weights_B, gradients_LBK, gradients_LBK)
    means_LPK = np.stack(means_P, axis=1)
    variances_L = squares_L - np.square(means_LPK).sum(axis=(1, 2))
    return {
        name: Moments(mean, float(v)) for name, mean, v in zip(AGGREGATES, means_LPK, variances_L, strict=True)
    }


def _merge(probability_C: np.ndarray, features_FC: np.ndarray) -> np.ndarray:
    """Give all probability of the completions that are equal in their features to the first of them."""
    _, first, inverse = np.unique(features_FC, axis=1, return_index=True, return_inverse=True)
    merged_C = np.zeros_like(probability_C)
    np.add.at(merged_C, first[inverse.reshape(-1)], probability_C)
    return merged_C


def _probability(group: tuple[int, ...], probability_C: np.ndarray) -> float:
    """Multinomial probability of a group in any order."""
    orders = math.factorial(len(group)) // math.prod(math.factorial(group.count(c)) for c in set(group))
    return orders * math.prod(probability_C[c] for c in group)


@functools.partial(jax.jit, static_argnames="estimator")
def advantages(rewards_BPG: Array, lengths_BPG: Array, *, estimator: str) -> Array:
    """:func:`~grpo_jax.algorithms.advantages.group_advantages` of each batch."""
    return jax.vmap(lambda r_PG, n_PG: group_advantages(r_PG, estimator=estimator, lengths_PG=n_PG))(
        rewards_BPG, lengths_BPG
    )


@functools.partial(jax.jit, static_argnames=("ratio", "beta", "kl_estimator", "kl_unbiased"))
def _slopes(*arrays: Array, clip: float = math.inf, beta: float = 0.0, **options: Any) -> Array:
    """Gradient of each batch's losses, one an aggregate, in its log-probabilities."""

    def losses_L(
        logps: Array, advantages: Array, own_mask: Array, old: Array, ref: Array, mask_PGT: Array
    ) -> Array:
        terms = {"old_logps_PGT": old, "ref_logps_PGT": ref if beta else None, "beta": beta}
        loss = functools.partial(
            grpo_loss, logps, advantages, own_mask, clip_low=clip, clip_high=clip, **terms, **options
        )
        denominators = {
            name: loss_denominator(mask_PGT, aggregate=name, max_completion_length=mask_PGT.shape[-1])
            for name in AGGREGATES
        }
        return jnp.stack([loss(aggregate=name, denominator=of)[0] for name, of in denominators.items()])

    return jax.vmap(jax.jacrev(losses_L))(*arrays)
