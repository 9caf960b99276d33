"""Slots that end take what is pending, on the device.

A slot takes its prompt's next pending completion; a row without any takes its shard's next pending prompt. Neither
is a prefill: all prompts were prefilled when the rollout began.

Shapes: P prompts, G completions of a prompt, T completion tokens, R rows of C decoding slots, Q shards of the mesh
that prompts are split over, X rows of a shard.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from grpo_jax.rollout.state import EngineConfig, EngineState
from grpo_jax.types import Array, Prefix


def refill(state: EngineState, was_alive_RC: Array, config: EngineConfig) -> EngineState:
    """Take ended completions out of their slots, and give the slots what is pending."""
    state = _take_out(state, was_alive_RC & ~state.alive_RC, config)
    R, C = state.alive_RC.shape
    Q = config.num_shards
    prompts_per_shard = state.tokens_PGT.shape[0] // Q

    free_RC = ~state.alive_RC
    pending_RC = state.next_sample_R[:, None] + jnp.cumsum(free_RC, axis=1) - 1
    takes_RC = free_RC & (pending_RC < config.group_size)
    next_sample_R = state.next_sample_R + takes_RC.sum(axis=1)

    done_R = ~(state.alive_RC | takes_RC).any(axis=1)
    pending_QX = state.next_prompt_Q[:, None] + jnp.cumsum(done_R.reshape(Q, -1), axis=1) - 1
    moves_QX = done_R.reshape(Q, -1) & (pending_QX < prompts_per_shard)
    moves_R = moves_QX.reshape(R)
    prompt_R = (jnp.arange(Q)[:, None] * prompts_per_shard + pending_QX).reshape(R)

    starts_RC = takes_RC | moves_R[:, None]
    sample_RC = jnp.where(takes_RC, pending_RC, state.sample_RC)
    row_prompt_R = jnp.where(moves_R, prompt_R, state.row_prompt_R)
    return dataclasses.replace(
        state,
        prefix=jax.lax.cond(
            moves_R.any(), lambda: take_rows(state.prefixes, row_prompt_R, Q), lambda: state.prefix
        ),
        row_prompt_R=row_prompt_R,
        next_sample_R=jnp.where(moves_R, C, next_sample_R),
        next_prompt_Q=state.next_prompt_Q + moves_QX.sum(axis=1),
        sample_RC=jnp.where(moves_R[:, None], jnp.arange(C)[None], sample_RC),
        length_RC=jnp.where(starts_RC, 0, state.length_RC),
        alive_RC=state.alive_RC | starts_RC,
        finished_RC=state.finished_RC & ~starts_RC,
        stop_RC=jnp.where(starts_RC, 0, state.stop_RC),
    )


def _take_out(state: EngineState, ended_RC: Array, config: EngineConfig) -> EngineState:
    """Copy the completions that just ended to where they belong in the batch."""
    P = state.tokens_PGT.shape[0]
    row_RC = jnp.where(ended_RC, state.row_prompt_R[:, None], P)  # P is out of range: dropped

    def put(out: Array, value: Array) -> Array:
        return out.at[row_RC, state.sample_RC].set(value, mode="drop")

    return dataclasses.replace(
        state,
        tokens_PGT=put(state.tokens_PGT, _unroll(state.tokens_RCT, state, config)),
        logps_PGT=put(state.logps_PGT, _unroll(state.logps_RCT, state, config)),
        length_PG=put(state.length_PG, state.length_RC),
        finished_PG=put(state.finished_PG, state.finished_RC),
    )


def _unroll(ring_RCT: Array, state: EngineState, config: EngineConfig) -> Array:
    """Ring order to token order: the slot's first token stands ``length`` columns back."""
    T = config.max_completion_length
    index_RCT = (state.step - state.length_RC[..., None] + jnp.arange(T)[None, None]) % T
    return jnp.take_along_axis(ring_RCT, index_RCT, axis=2)


def take_rows(prefixes: Prefix, row_prompt_R: Array, num_shards: int) -> Prefix:
    """The rows' (unstacked) prefixes; each row's prompt lies in its own shard, so nothing crosses shards."""
    Q, P = num_shards, prefixes.length_P.shape[0]
    local_QX = row_prompt_R.reshape(Q, -1) - jnp.arange(Q)[:, None] * (P // Q)

    def take(x: Array) -> Array:
        """Index the prompts within each shard."""
        shards = x.reshape(Q, P // Q, *x.shape[1:])
        return jax.vmap(lambda part, index: part[index])(shards, local_QX).reshape(-1, *x.shape[1:])

    return jax.tree.map(take, prefixes)
