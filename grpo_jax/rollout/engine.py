"""A rollout as one compiled program: prefill, decoding, sampling, stops and refill, no host round trip a token.

Shapes: P prompts, G completions of a prompt, S prompt tokens, T completion tokens, D width, V vocabulary; R rows
of C decoding slots; Q shards of the mesh that prompts are split over.

The slots of one prompt stand side by side in a row, so that attention to the prompt is one product a row. With
fewer slots than completions, a slot that ends takes its prompt's next pending completion, and a row without any
takes its shard's next pending prompt; neither is a prefill. Each slot writes at the same column of a ring of T
columns, so that a refilled slot needs no bookkeeping but its length: its tokens are the last ``length`` columns.

The key of a token is ``fold_in(fold_in(key, sample), position)`` with ``sample`` counted over the whole batch:
the draws depend neither on the number of slots nor on the mesh or the number of hosts.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from grpo_jax.algorithms.logprobs import scaled_logits
from grpo_jax.mesh import GROUP_AXES, constrain
from grpo_jax.rollout.sampling import SamplingParams, draw, truncate
from grpo_jax.types import Array, Cache, Model, Params, Prefix, Rollout


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What a compiled rollout is specialised to."""

    group_size: int
    max_completion_length: int
    vocab_size: int
    """Ids that the tokenizer knows: no other is sampled."""
    eos_ids: tuple[int, ...]
    """Any of them ends a completion."""
    pad_id: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    num_slots: int | None = None
    """Completions decoded at a time; None: all."""
    num_shards: int = 1
    """Parts of the prompts with a queue of their own: the mesh's data * fsdp."""


@struct.dataclass
class EngineState:
    """Where a rollout stands. All of it is on the device; the loop's only host value is the result."""

    prefixes: Prefix
    """Of all prompts of the batch."""
    prefix: Prefix
    """Of the prompt that each row works on."""
    cache_kv: Any
    step: Array
    """Tokens decoded so far in each slot, dead ones included; the ring's next column is step mod T."""
    row_prompt_R: Array
    """The row's prompt: its index in the whole batch."""
    next_sample_R: Array
    """The next completion of the row's prompt that no slot has taken."""
    next_prompt_Q: Array
    """The shard's next prompt that no row has taken, counted within the shard."""
    sample_RC: Array
    """Which completion of its prompt a slot holds."""
    length_RC: Array
    """Tokens of that completion."""
    alive_RC: Array
    finished_RC: Array
    """The slot's completion ended by itself."""
    stop_RC: Array
    """State of the stop-string automaton."""
    token_RC: Array
    tokens_RCT: Array
    logps_RCT: Array
    """What each slot has sampled, in ring order."""
    tokens_PGT: Array
    logps_PGT: Array
    length_PG: Array
    finished_PG: Array
    """What has been taken out of slots that were refilled."""


def generate(
    model: Model,
    params: Params,
    prompt_PS: Array,
    prompt_mask_PS: Array,
    key: Array,
    stop_table: Array | None,
    config: EngineConfig,
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
    """
    state = _start(model, params, prompt_PS, prompt_mask_PS, config)
    state = _emit(model, params, state, state.prefix.hidden_PD[:, None], key, stop_table, config)
    state = jax.lax.while_loop(
        lambda state: state.alive_RC.any(),
        lambda state: _decode(model, params, state, key, stop_table, config),
        state,
    )
    return _collect(state, prompt_PS, prompt_mask_PS, config)


def _start(
    model: Model, params: Params, prompt_PS: Array, prompt_mask_PS: Array, config: EngineConfig
) -> EngineState:
    """Prefill every prompt, and give the first ones to the rows."""
    P, G, T = prompt_PS.shape[0], config.group_size, config.max_completion_length
    R, C = slot_layout(P, config)
    Q = config.num_shards
    prefixes = model.prefill(params, prompt_PS, prompt_mask_PS)
    row_prompt_R = (jnp.arange(Q)[:, None] * (P // Q) + jnp.arange(R // Q)[None]).reshape(R)
    refills = R * C < P * G

    def slots(value: int, dtype: Any = jnp.int32) -> Array:
        return constrain(jnp.full((R, C), value, dtype), GROUP_AXES)

    def tokens(rows: int, group: int, dtype: Any) -> Array:
        return constrain(jnp.zeros((rows, group, T), dtype), (*GROUP_AXES, None))

    # Without refill nothing is ever taken out of the slots, and the out arrays are empty.
    out_P, out_G = (P, G) if refills else (0, 0)
    return EngineState(
        prefixes=prefixes if refills else prefixes.take(jnp.arange(0)),
        prefix=_take_rows(prefixes, row_prompt_R, Q) if refills else prefixes,
        cache_kv=model.init_cache(params, R, C, T),
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


def slot_layout(num_prompts: int, config: EngineConfig) -> tuple[int, int]:
    """Rows and slots a row: whole groups where the slots allow it, else one row a shard of a part of one."""
    if config.num_slots is None or config.num_slots >= num_prompts * config.group_size:
        return num_prompts, config.group_size
    slots_per_row = min(config.group_size, config.num_slots // config.num_shards)
    num_rows = config.num_slots // slots_per_row
    assert num_rows % config.num_shards == 0 and num_prompts % config.num_shards == 0, (num_rows, config)
    return num_rows, slots_per_row


def _decode(
    model: Model,
    params: Params,
    state: EngineState,
    key: Array,
    stop_table: Array | None,
    config: EngineConfig,
) -> EngineState:
    """Run each slot's last token through the model, then sample the next one."""
    T = config.max_completion_length
    column = (state.step - 1) % T
    age_T = (column - 1 - jnp.arange(T)) % T
    held_RC = jnp.maximum(state.length_RC - 1, 0)
    cache = Cache(kv=state.cache_kv, mask_RCT=age_T[None, None] < held_RC[..., None], length_RC=held_RC)
    hidden_RC1D, new_kv = model.extend(params, state.token_RC[..., None], state.prefix, cache)
    state = dataclasses.replace(state, cache_kv=model.append(state.cache_kv, new_kv, column))
    # A slot that was just refilled has no token yet: its first one is predicted by the prompt.
    hidden_RCD = jnp.where(
        (state.length_RC == 0)[..., None], state.prefix.hidden_PD[:, None], hidden_RC1D[:, :, 0]
    )
    return _emit(model, params, state, hidden_RCD, key, stop_table, config)


def _emit(
    model: Model,
    params: Params,
    state: EngineState,
    hidden_RCD: Array,
    key: Array,
    stop_table: Array | None,
    config: EngineConfig,
) -> EngineState:
    """Sample a token in each slot, end completions, and refill the slots that ended."""
    R, C = state.length_RC.shape
    T = config.max_completion_length
    hidden_RCD = jnp.broadcast_to(hidden_RCD, (R, C, hidden_RCD.shape[-1]))
    sample_RC = state.row_prompt_R[:, None] * config.group_size + state.sample_RC
    token_RC, logp_RC = _sample(model, params, hidden_RCD, sample_RC, state.length_RC, key, config)

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
    return jax.lax.cond(any_ended, lambda s: _refill(s, was_alive_RC, config), lambda s: s, state)


def _write_column(ring_RCT: Array, value_RC: Array, write_RC: Array, column: Array) -> Array:
    """``value`` at ``column`` of the slots to write; the others keep what they hold."""
    kept_RC = jax.lax.dynamic_index_in_dim(ring_RCT, column, axis=2, keepdims=False)
    value_RC = jnp.where(write_RC, value_RC, kept_RC)
    return jax.lax.dynamic_update_index_in_dim(ring_RCT, value_RC, column, axis=2)


def _sample(
    model: Model,
    params: Params,
    hidden_RCD: Array,
    sample_RC: Array,
    position_RC: Array,
    key: Array,
    config: EngineConfig,
) -> tuple[Array, Array]:
    """The next token of each slot, and its log-probability under the distribution it was drawn from."""
    R, C, D = hidden_RCD.shape
    greedy = config.sampling.temperature == 0
    logits_NV = scaled_logits(
        hidden_RCD.reshape(R * C, D),
        model.head(params),
        temperature=1.0 if greedy else config.sampling.temperature,
        vocab_size=config.vocab_size,
    )
    if greedy:
        token_N = jnp.argmax(logits_NV, axis=-1).astype(jnp.int32)
        logp_N = jnp.max(logits_NV, axis=-1) - jax.nn.logsumexp(logits_NV, axis=-1)
    else:
        logits_NV = truncate(
            logits_NV, top_k=config.sampling.top_k, top_p=config.sampling.top_p, min_p=config.sampling.min_p
        )
        fold = jax.vmap(lambda sample, position: jax.random.fold_in(jax.random.fold_in(key, sample), position))
        token_N, logp_N = draw(fold(sample_RC.reshape(-1), position_RC.reshape(-1)), logits_NV)
    return token_N.reshape(R, C), logp_N.reshape(R, C)


def _refill(state: EngineState, was_alive_RC: Array, config: EngineConfig) -> EngineState:
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
            moves_R.any(), lambda: _take_rows(state.prefixes, row_prompt_R, Q), lambda: state.prefix
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


def _take_rows(prefixes: Prefix, row_prompt_R: Array, num_shards: int) -> Prefix:
    """The rows' prefixes; each row's prompt lies in its own shard, so nothing crosses shards."""
    Q, P = num_shards, prefixes.length_P.shape[0]
    local_QX = row_prompt_R.reshape(Q, -1) - jnp.arange(Q)[:, None] * (P // Q)

    def take(x: Array, axis: int) -> Array:
        """Index ``axis`` (prompts) within each shard."""
        before, after = x.shape[:axis], x.shape[axis + 1 :]
        shards = x.reshape(*before, Q, P // Q, *after)
        rows = jax.vmap(lambda part, index: jnp.take(part, index, axis=axis), (axis, 0), axis)(shards, local_QX)
        return rows.reshape(*before, -1, *after)

    return Prefix(
        kv=jax.tree.map(lambda x: take(x, 1), prefixes.kv),
        mask_PS=take(prefixes.mask_PS, 0),
        length_P=take(prefixes.length_P, 0),
        hidden_PD=take(prefixes.hidden_PD, 0),
    )


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
