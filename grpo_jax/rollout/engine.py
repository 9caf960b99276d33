"""A rollout as one compiled program: prefill, decoding, sampling, stops and refill, no host round trip a token.

Shapes: P prompts, G completions of a prompt, S prompt tokens, T completion tokens, D width, V vocabulary; R rows
of C decoding slots; Q shards of the mesh that prompts are split over.

The slots of one prompt stand side by side in a row, so that attention to the prompt is one product a row. With
fewer slots than completions, rows are narrow: a slot that ends takes its prompt's next pending completion, and a
row without any takes its shard's next pending prompt; neither is a prefill. Each slot writes at the same column of
a ring of T columns, so that a refilled slot needs no bookkeeping but its length: its tokens are the last
``length`` columns.

The key of a token is ``fold_in(fold_in(key, sample), position)`` with ``sample`` counted over the whole batch:
the draws depend neither on the number of slots nor on the mesh or the number of hosts.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.algorithms.logprobs import scaled_logits
from grpo_jax.mesh import GROUP_AXES, constrain, group_shards, slot_layout
from grpo_jax.rollout.refill import refill, take_rows
from grpo_jax.rollout.sampling import draw, truncate
from grpo_jax.rollout.state import EngineConfig, EngineState
from grpo_jax.types import Array, Cache, Model, Params, Prefix, Rollout


def generate(
    model: Model,
    params: Params,
    prompt_PS: Array,
    prompt_mask_PS: Array,
    key: Array,
    stop_table: Array | None,
    config: EngineConfig,
    prompt_number_P: Array | None = None,
) -> Rollout:
    """Sample G completions of each prompt; to be compiled with ``model`` and ``config`` static.

    Args:
        model: the policy's functions.
        params: its parameters.
        prompt_PS: left-padded prompts.
        prompt_mask_PS: True on real prompt tokens.
        key: the rollout's random key.
        stop_table: from :func:`grpo_jax.rollout.stop.stop_table`, or None.
        config: sizes, sampling and ids.
        prompt_number_P: each prompt's number in the batch that these are a part of, whole on every device; None:
            these are all of it.

    Returns:
        The completions in the order of the prompts, padded with ``config.pad_id``, with the log-probabilities that
        their tokens were drawn with.

    Raises:
        ValueError: ``config.num_slots`` makes no equal rows on the shards.
    """
    prefixes = model.prefill(params, prompt_PS, prompt_mask_PS)
    params, prefixes = model.unstack(params, prefixes)
    uniforms_PGT2 = None
    if config.sampling.temperature > 0:
        if prompt_number_P is None:
            prompt_number_P = jnp.arange(prompt_PS.shape[0])
        uniforms_PGT2 = _uniforms(key, prompt_number_P, config)
    state = _start(model, params, prefixes, config)
    state = _emit(model, params, state, state.prefix.hidden_PD[:, None], uniforms_PGT2, stop_table, config)
    for capacity in config.capacities:
        # Attention reads all columns there are: they are added as they are needed, and the last loop is a ring.
        state = dataclasses.replace(state, cache_kv=model.grow_cache(state.cache_kv, capacity))
        last = capacity == config.max_completion_length
        decode = functools.partial(_decode, model, params, uniforms_PGT2, stop_table, config, capacity)
        state = jax.lax.while_loop(functools.partial(_goes_on, None if last else capacity), decode, state)
    return _collect(state, prompt_PS, prompt_mask_PS, config)


def _uniforms(key: Array, prompt_number_P: Array, config: EngineConfig) -> Array:
    """The two numbers in [0, 1) that each possible token is drawn with: all at once, outside of the loop."""
    G, T = config.group_size, config.max_completion_length
    sample_PG = prompt_number_P[:, None] * G + jnp.arange(G)[None]

    def one(sample: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, sample), position), (2,))

    each_position = jax.vmap(one, in_axes=(None, 0))
    each_sample = jax.vmap(jax.vmap(each_position, in_axes=(0, None)), in_axes=(0, None))
    # Whole on every device: whatever a slot works on, its numbers are there.
    return constrain(each_sample(sample_PG, jnp.arange(T)), (None, None, None, None))


def _start(model: Model, params: Params, prefixes: Prefix, config: EngineConfig) -> EngineState:
    """Give the first prompts to the rows."""
    P, G, T = prefixes.length_P.shape[0], config.group_size, config.max_completion_length
    Q = config.num_shards
    R, C = slot_layout(P, G, config.num_slots, Q, group_shards())
    assert R % Q == P % Q == 0, (P, R, config)
    row_prompt_R = (jnp.arange(Q)[:, None] * (P // Q) + jnp.arange(R // Q)[None]).reshape(R)
    refills = R * C < P * G

    def slots(value: int, dtype: Any = jnp.int32) -> Array:
        return constrain(jnp.full((R, C), value, dtype), GROUP_AXES)

    def tokens(rows: int, group: int, dtype: Any) -> Array:
        return constrain(jnp.zeros((rows, group, T), dtype), (*GROUP_AXES, None))

    # Without refill nothing is ever taken out of the slots, and the out arrays are empty.
    out_P, out_G = (P, G) if refills else (0, 0)
    return EngineState(
        prefixes=prefixes if refills else jax.tree.map(lambda x: x[:0], prefixes),
        prefix=take_rows(prefixes, row_prompt_R, Q) if refills else prefixes,
        cache_kv=model.init_cache(params, R, C, config.capacities[0]),
        step=jnp.int32(0),
        row_prompt_R=row_prompt_R,
        next_sample_R=jnp.full((R,), C, jnp.int32),
        next_prompt_Q=jnp.full((Q,), R // Q, jnp.int32),
        sample_RC=slots(0) + jnp.arange(C)[None],
        length_RC=slots(0),
        alive_RC=slots(True, jnp.bool),
        finished_RC=slots(False, jnp.bool),
        stop_RC=slots(0),
        token_RC=slots(config.pad_id),
        tokens_RCT=tokens(R, C, jnp.int32),
        logps_RCT=tokens(R, C, jnp.float32),
        tokens_PGT=tokens(out_P, out_G, jnp.int32),
        logps_PGT=tokens(out_P, out_G, jnp.float32),
        length_PG=jnp.zeros((out_P, out_G), jnp.int32),
        finished_PG=jnp.zeros((out_P, out_G), jnp.bool),
    )


def _goes_on(capacity: int | None, state: EngineState) -> Array:
    """Some slot is at work, and the cache has room (None: it is a ring, and always has)."""
    working = state.alive_RC.any()
    return working if capacity is None else working & (state.step <= capacity)


def _decode(
    model: Model,
    params: Params,
    uniforms_PGT2: Array | None,
    stop_table: Array | None,
    config: EngineConfig,
    capacity: int,
    state: EngineState,
) -> EngineState:
    """Run each slot's last token through the model, then sample the next one."""
    T = config.max_completion_length
    column = (state.step - 1) % T
    # Of each column; those never written to are older than any completion.
    age_of_column = (column - 1 - jnp.arange(capacity)) % T
    held_RC = jnp.maximum(state.length_RC - 1, 0)
    cache = Cache(kv=state.cache_kv, mask_RCT=age_of_column[None, None] < held_RC[..., None], length_RC=held_RC)
    hidden_RC1D, new_kv = model.extend(params, state.token_RC[..., None], state.prefix, cache)
    # All layers have read the cache before it is written to: XLA then writes in place, where it copied all of it.
    hidden_RC1D, new_kv = jax.lax.optimization_barrier((hidden_RC1D, new_kv))
    state = dataclasses.replace(state, cache_kv=model.append(state.cache_kv, new_kv, column))
    # A slot that was just refilled has no token yet: its first one is predicted by the prompt.
    hidden_RCD = jnp.where(
        (state.length_RC == 0)[..., None], state.prefix.hidden_PD[:, None], hidden_RC1D[:, :, 0]
    )
    return _emit(model, params, state, hidden_RCD, uniforms_PGT2, stop_table, config)


def _emit(
    model: Model,
    params: Params,
    state: EngineState,
    hidden_RCD: Array,
    uniforms_PGT2: Array | None,
    stop_table: Array | None,
    config: EngineConfig,
) -> EngineState:
    """Sample a token in each slot, end completions, and refill the slots that ended."""
    R, C = state.length_RC.shape
    T = config.max_completion_length
    hidden_RCD = jnp.broadcast_to(hidden_RCD, (R, C, hidden_RCD.shape[-1]))
    uniforms_RC2 = None
    if uniforms_PGT2 is not None:
        uniforms_RC2 = uniforms_PGT2[
            state.row_prompt_R[:, None], state.sample_RC, jnp.minimum(state.length_RC, T - 1)
        ]
    token_RC, logp_RC = _sample(model, params, hidden_RCD, uniforms_RC2, config)

    length_RC = state.length_RC + state.alive_RC
    ended_RC = jnp.isin(token_RC, jnp.asarray(config.eos_ids))
    stop_RC = state.stop_RC
    if stop_table is not None:
        stop_RC = stop_table[stop_RC, token_RC].astype(jnp.int32)
        ended_RC |= stop_RC == stop_table.shape[0] - 1
    column = state.step % T
    was_alive_RC = state.alive_RC
    state = dataclasses.replace(
        state,
        step=state.step + 1,
        length_RC=length_RC,
        finished_RC=jnp.where(was_alive_RC, ended_RC, state.finished_RC),
        alive_RC=was_alive_RC & ~ended_RC & (length_RC < T),
        stop_RC=stop_RC,
        token_RC=token_RC,
        tokens_RCT=_write_column(state.tokens_RCT, token_RC, was_alive_RC, column),
        logps_RCT=_write_column(state.logps_RCT, logp_RC, was_alive_RC, column),
    )
    if state.tokens_PGT.size == 0:
        return state
    any_ended = (was_alive_RC & ~state.alive_RC).any()
    return jax.lax.cond(any_ended, lambda s: refill(s, was_alive_RC, config), lambda s: s, state)


def _write_column(ring_RCT: Array, value_RC: Array, write_RC: Array, column: Array) -> Array:
    """``value`` at ``column`` of the slots to write; the others keep what they hold."""
    kept_RC = jax.lax.dynamic_index_in_dim(ring_RCT, column, axis=2, keepdims=False)
    value_RC = jnp.where(write_RC, value_RC, kept_RC)
    return jax.lax.dynamic_update_index_in_dim(ring_RCT, value_RC, column, axis=2)


def _sample(
    model: Model,
    params: Params,
    hidden_RCD: Array,
    uniforms_RC2: Array | None,
    config: EngineConfig,
) -> tuple[Array, Array]:
    """The next token of each slot, and its log-probability under the distribution it was drawn from."""
    R, C, D = hidden_RCD.shape
    greedy = uniforms_RC2 is None
    logits_NV = scaled_logits(
        hidden_RCD.reshape(R * C, D),
        model.head(params),
        temperature=1.0 if greedy else config.sampling.temperature,
        vocab_size=config.vocab_size,
    )
    if uniforms_RC2 is None:
        token_N = jnp.argmax(logits_NV, axis=-1).astype(jnp.int32)
        logp_N = jnp.max(logits_NV, axis=-1) - jax.nn.logsumexp(logits_NV, axis=-1)
    else:
        logits_NV = truncate(
            logits_NV, top_k=config.sampling.top_k, top_p=config.sampling.top_p, min_p=config.sampling.min_p
        )
        token_N, logp_N = draw(uniforms_RC2.reshape(R * C, 2), logits_NV)
    return token_N.reshape(R, C), logp_N.reshape(R, C)


def _collect(state: EngineState, prompt_PS: Array, prompt_mask_PS: Array, config: EngineConfig) -> Rollout:
    """The rollout in batch order, padded."""
    refilled = state.tokens_PGT.size > 0
    # Without refill every slot started at column 0, and its row and slot are its place in the batch.
    tokens_PGT = state.tokens_PGT if refilled else state.tokens_RCT
    logps_PGT = state.logps_PGT if refilled else state.logps_RCT
    length_PG = state.length_PG if refilled else state.length_RC
    mask_PGT = jnp.arange(config.max_completion_length)[None, None] < length_PG[..., None]
    mask_PGT = constrain(mask_PGT, (*GROUP_AXES, None))
    return Rollout(
        prompt_PS=prompt_PS,
        prompt_mask_PS=prompt_mask_PS,
        completion_PGT=jnp.where(mask_PGT, tokens_PGT, config.pad_id),
        completion_mask_PGT=mask_PGT,
        sampler_logps_PGT=jnp.where(mask_PGT, logps_PGT, 0.0),
        finished_PG=state.finished_PG if refilled else state.finished_RC,
    )
