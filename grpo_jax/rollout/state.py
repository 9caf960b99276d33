"""What a rollout is compiled for, and where it stands.

Shapes: P prompts, G completions of a prompt, T completion tokens, R rows of C decoding slots, Q shards of the mesh
that prompts are split over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flax import struct

from grpo_jax.rollout.sampling import SamplingParams
from grpo_jax.types import Array, Prefix

# Decoding is compiled once a segment: short ones would cost more to compile than they save.
_MAX_SEGMENTS = 4
_MIN_SEGMENT = 64


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
    num_segments: int | None = None
    """Steps in which the cache grows to its length; see :func:`cache_capacities`."""

    @property
    def capacities(self) -> tuple[int, ...]:
        """Columns of the cache as it fills: decoding reads all that there are."""
        return cache_capacities(self.max_completion_length, self.num_segments)


def cache_capacities(max_completion_length: int, num_segments: int | None = None) -> tuple[int, ...]:
    """Columns of a cache that grows in equal steps; None: one for 64 tokens, at most four."""
    T = max_completion_length
    segments = num_segments or min(max(T // _MIN_SEGMENT, 1), _MAX_SEGMENTS)
    return tuple(-(-T * part // segments) for part in range(1, segments + 1))


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
