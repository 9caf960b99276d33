"""A model whose logits depend on every token of the prompt and of the completion, small enough to redo in NumPy.

The hidden state is the last token (one-hot), a tenth of the count of each token so far, and a hundredth of the
position: a wrong cache column, mask, prefix or position changes the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.types import Array, Cache, Params, Prefix


@dataclass(frozen=True)
class CountingModel:
    """Implements grpo_jax.types.Model; ``params`` is the head, ``[V, V + 1]``."""

    vocab_size: int

    def prefill(self, params: Params, prompt_PS: Array, prompt_mask_PS: Array) -> Prefix:
        onehot_PSV = jax.nn.one_hot(prompt_PS, self.vocab_size) * prompt_mask_PS[..., None]
        count_PV = onehot_PSV.sum(axis=1)
        length_P = prompt_mask_PS.sum(axis=1).astype(jnp.int32)
        hidden_PD = self._hidden(onehot_PSV[:, -1], count_PV, length_P - 1)
        return Prefix(kv=count_PV, mask_PS=prompt_mask_PS, length_P=length_P, hidden_PD=hidden_PD)

    def unstack(self, params: Params, prefix: Prefix) -> tuple[Params, Prefix]:
        return params, prefix

    def extend(
        self,
        params: Params,
        tokens_PGT: Array,
        prefix: Prefix,
        cache: Cache | None = None,
        place_PGT: Array | None = None,
    ) -> tuple[Array, Any]:
        onehot_PGTV = jax.nn.one_hot(tokens_PGT, self.vocab_size)
        count_PGTV = jnp.cumsum(onehot_PGTV, axis=2) + prefix.kv[:, None, None]
        start_PG = jnp.broadcast_to(prefix.length_P[:, None], tokens_PGT.shape[:2])
        if cache is not None:
            held_PGTV = cache.kv * cache.mask_RCT[..., None]
            count_PGTV = count_PGTV + held_PGTV.sum(axis=2, keepdims=True)
            start_PG = start_PG + cache.length_RC
        position_PGT = start_PG[..., None] + jnp.arange(tokens_PGT.shape[2])[None, None]
        return self._hidden(onehot_PGTV, count_PGTV, position_PGT), onehot_PGTV

    def _hidden(self, onehot: Array, count: Array, position: Array) -> Array:
        return jnp.concatenate([onehot + 0.1 * count, 0.01 * position[..., None]], axis=-1)

    def init_cache(self, params: Params, num_rows: int, num_slots: int, capacity: int) -> Any:
        return jnp.zeros((num_rows, num_slots, capacity, self.vocab_size))

    def grow_cache(self, cache_kv: Any, capacity: int) -> Any:
        return jnp.pad(cache_kv, ((0, 0), (0, 0), (0, capacity - cache_kv.shape[2]), (0, 0)))

    def append(self, cache_kv: Any, new_kv: Any, column: Array) -> Any:
        return jax.lax.dynamic_update_slice_in_dim(cache_kv, new_kv, column, axis=2)

    def head(self, params: Params) -> Array:
        return params


def numpy_logits(head_VD: np.ndarray, prompt: list[int], completion: list[int]) -> np.ndarray:
    """The logits after a prompt and the first tokens of a completion, in float64."""
    vocab_size = head_VD.shape[0]
    tokens = [*prompt, *completion]
    onehot = np.eye(vocab_size)[tokens[-1]]
    count = np.bincount(tokens, minlength=vocab_size)
    hidden = np.concatenate([onehot + 0.1 * count, [0.01 * (len(tokens) - 1)]])
    return head_VD.astype(np.float64) @ hidden
