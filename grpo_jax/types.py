"""The arrays that travel between the parts, and the letters that name their axes.

P prompts, G completions a prompt (the group), S prompt tokens, T completion tokens, K reward
functions, D model width, F feed-forward width, N query heads, K key-value heads (in models), H head
width, L layers, V vocabulary, R rows of decoding slots, C slots in a row.

A name such as ``logps_PGT`` states the shape ``[P, G, T]``. Completions are never flattened into
``P*G`` rows that repeat their prompt.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
from flax import struct

Array = jax.Array
Params = Any
"""A pytree of parameter arrays, as nested dictionaries."""


@struct.dataclass
class Prefix:
    """What a prompt leaves behind for its completions; held once a prompt, whatever the group size."""

    kv: Any
    """Keys and values of the prompt: a pytree whose leaves are ``[L, P, ...]``, or ``[P, ...]`` when unstacked."""
    mask_PS: Array
    """bool; True on real prompt tokens."""
    length_P: Array
    """int32; real prompt tokens, hence the position of the first completion token."""
    hidden_PD: Array
    """The last prompt token's hidden state: it predicts the first completion token."""


@struct.dataclass
class Cache:
    """Keys and values of the tokens that each decoding slot has produced.

    The columns are a ring: every slot writes at the same column of a step, and ``mask_RCT`` says which
    columns belong to the slot's present completion. Positions are applied to keys before they are
    stored, so the order of the columns does not matter.
    """

    kv: Any
    """A pytree in the model's own layout."""
    mask_RCT: Array
    """bool; True on the columns that the slot's next token attends to."""
    length_RC: Array
    """int32; completion tokens that the slot holds already."""


class Model(Protocol):
    """What rollout and training need of a model: two entry points and the output matrix.

    An implementation is hashable (it is a static argument of compiled functions) and holds no arrays.
    """

    @property
    def vocab_size(self) -> int:
        """Width of the output matrix; ids at and beyond the tokenizer's size are never sampled."""
        ...

    def prefill(self, params: Params, prompt_PS: Array, prompt_mask_PS: Array) -> Prefix:
        """Run the left-padded prompts once."""
        ...

    def extend(
        self,
        params: Params,
        tokens_PGT: Array,
        prefix: Prefix,
        cache: Cache | None = None,
        place_PGT: Array | None = None,
    ) -> tuple[Array, Any]:
        """Run completion tokens after their prefix (and cache).

        ``place_PGT`` is each token's place in its completion, where a row holds several. Returns
        ``(hidden_PGTD, new_kv)``: hidden state t predicts token t+1, and ``new_kv`` are the keys and values of
        ``tokens_PGT``, for :meth:`append`.
        """
        ...

    def unstack(self, params: Params, prefix: Prefix) -> tuple[Params, Prefix]:
        """The same in the form that a loop over single tokens reads fastest; :meth:`extend` takes either."""
        ...

    def init_cache(self, params: Params, num_rows: int, num_slots: int, capacity: int) -> Any:
        """Zeros for :attr:`Cache.kv`: ``capacity`` columns for each of ``[num_rows, num_slots]``."""
        ...

    def grow_cache(self, cache_kv: Any, capacity: int) -> Any:
        """The same with zeros up to ``capacity`` columns."""
        ...

    def append(self, cache_kv: Any, new_kv: Any, column: Array) -> Any:
        """Write the ``new_kv`` of one token a slot at ``column`` of the ring."""
        ...

    def head(self, params: Params) -> Array:
        """The output matrix ``head_VD``: logits are ``hidden_D @ head_VD.T``."""
        ...


PROMPT_FIELDS = ("prompt_PS", "prompt_mask_PS")
"""Fields of a rollout and of a batch that are one row a prompt; the others are ``[P, G, ...]``."""


@struct.dataclass
class Rollout:
    """P prompts and G sampled completions of each."""

    prompt_PS: Array
    """int32; prompt tokens, left-padded, one row a prompt."""
    prompt_mask_PS: Array
    """bool; True on real prompt tokens."""
    completion_PGT: Array
    """int32; sampled tokens, right-padded with the pad id."""
    completion_mask_PGT: Array
    """bool; True on every token that the policy chose, the end-of-sequence token included."""
    sampler_logps_PGT: Array
    """float32; log-probabilities under the distribution that was sampled from; 0 where masked."""
    finished_PG: Array
    """bool; the completion ended by itself (EOS or a stop string), it was not cut off."""


@struct.dataclass
class TrainBatch:
    """One optimizer batch: a rollout with what the objective needs beside the policy."""

    prompt_PS: Array
    prompt_mask_PS: Array
    completion_PGT: Array
    loss_mask_PGT: Array
    """bool; the completion mask less what the config masks out (truncated, zero-spread groups)."""
    sampler_logps_PGT: Array
    advantages_PG: Array
    """float32; 0 for a missing reward."""
    old_logps_PGT: Array | None
    """float32; the policy at the start of this batch's updates; None for one update a batch."""
    ref_logps_PGT: Array | None
    """float32; the reference policy; None when beta is 0."""
    policy_mask_PGT: Array | None = None
    """bool; tokens whose surrogate counts (those of largest entropy in the batch); None for all."""
    selected_PGT: Array | None = None
    """bool; tokens of largest covariance in the batch; None where the surrogate has no use for them."""


@struct.dataclass
class TrainState:
    """All arrays that the next step depends on."""

    params: Params
    """The policy's float32 master weights."""
    ref_params: Params | None
    """The reference policy; None when beta is 0."""
    opt_state: Any
    step: Array
    """int32; batches trained on so far."""
    ahead: Rollout | None = None
    """The next batch's rollout, where it was sampled with earlier parameters; in checkpoints only."""
