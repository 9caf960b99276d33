"""Attention by the Pallas splash kernel of TPUs. Shapes and padding: see grpo_jax/models/kernels.py."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention

from grpo_jax.models.kv import KV, Context, padded, round_up
from grpo_jax.types import Array

# Blocks of queries and of keys are multiples of the lanes of a TPU's vector unit.
_LANES = 128
_BLOCKS = (512, 256, _LANES)
# A query's row and the first row that it sees share one int32.
_ROW_BITS = 15
MAX_TOKENS = 1 << _ROW_BITS
"""The longest row that the kernel is given."""


def splash(
    q_PKGTQH: Array,
    own: KV,
    document_PGT: Array | None,
    context: tuple[Context, ...],
    /,
    *,
    interpret: bool = False,
) -> Array:
    """Splash attention of completions to themselves and to their prompt; each document's tokens are neighbours.

    Blocks of keys that come after all queries of a block are skipped. Which of the prompt's keys are padding, and
    where the documents of a row begin, is data. ``interpret`` runs it on any device, slowly.
    """
    P, K, G, T, Q, H = q_PKGTQH.shape
    ((prompt, mask_PS),) = context
    S = mask_PS.shape[1]
    rows, keys = round_up(T, _LANES), round_up(S + T, _LANES)

    def joined(own_PKGTH: Array, prompt_PKSH: Array) -> Array:
        first = jnp.broadcast_to(prompt_PKSH[:, None], (P, G, K, S, H))
        both = jnp.concatenate([first, jnp.einsum("pkgth->pgkth", own_PKGTH)], axis=3)
        return padded(both, 3, keys).reshape(P * G, K, keys, H)

    # The kernel does not scale.
    q_BNTH = jnp.einsum("pkgtqh->pgkqth", q_PKGTQH / math.sqrt(H)).reshape(P * G, K * Q, T, H)
    # Real keys are segment 1 like all queries, and padding is segment 0.
    real_PS = padded(jnp.pad(mask_PS.astype(jnp.int32), ((0, 0), (0, T)), constant_values=1), 1, keys)
    kernel = _splash_kernel(_Sees(rows, keys, S), K * Q, interpret)

    def row(q_NTH: Array, k_KSH: Array, v_KSH: Array, real_S: Array, sequence_T: Array | None) -> Array:
        ids = splash_attention.SegmentIds(q=jnp.ones(rows, jnp.int32), kv=real_S)
        return _with_sequence(kernel, sequence_T)(q_NTH, k_KSH, v_KSH, segment_ids=ids)

    sequence_BT = None
    if document_PGT is not None:
        sequence_BT = _sequence(padded(_starts(document_PGT.reshape(P * G, T)), 1, rows))
    attended_BNTH = jax.vmap(row)(
        padded(q_BNTH, 2, rows),
        joined(own.k, prompt.k),
        joined(own.v, prompt.v),
        jnp.repeat(real_PS, G, axis=0),
        sequence_BT,
    )
    return jnp.einsum("pgkqth->pkgtqh", attended_BNTH[:, :, :T].reshape(P, G, K, Q, T, H))


def _starts(document_BT: Array) -> Array:
    """The row at which each token's document begins."""
    begins_BT = jnp.diff(document_BT, axis=1, prepend=document_BT[:, :1]) != 0
    row_1T = jnp.arange(document_BT.shape[1], dtype=jnp.int32)[None]
    return jax.lax.cummax(jnp.where(begins_BT, row_1T, 0), axis=1)


def _sequence(start_BT: Any) -> Any:
    """What the kernel knows of each query: its row, and the first row that it sees."""
    return start_BT << _ROW_BITS | np.arange(start_BT.shape[-1], dtype=np.int32)[None]


@dataclass(frozen=True)
class _Rule:
    """Whether a query sees a key, of NumPy's arrays and in the kernel. Equal rules are one compilation."""

    prompt_keys: int

    def __call__(self, sequence: Any, key: Any) -> Any:
        row, start, own = sequence & MAX_TOKENS - 1, sequence >> _ROW_BITS, key - self.prompt_keys
        return (own < 0) | (own >= start) & (own <= row)


@dataclass(frozen=True)
class _Sees(splash_attention.Mask):
    """The mask of rows with one document: its prompt, and its own keys up to the query's."""

    rows: int
    keys: int
    prompt_keys: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.keys

    @functools.cached_property
    def q_sequence(self) -> np.ndarray:
        return _sequence(np.zeros((1, self.rows), np.int32))[0]

    @property
    def mask_function(self) -> _Rule:
        return _Rule(self.prompt_keys)

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        rows, keys = index
        return self.mask_function(self.q_sequence[rows, None], np.arange(self.keys)[None, keys])


def _splash_kernel(mask: _Sees, num_heads: int, interpret: bool) -> Any:
    bq, bk = (next(b for b in _BLOCKS if size % b == 0) for size in mask.shape)
    sizes = splash_attention.BlockSizes(
        block_q=bq, block_kv=bk, block_q_dkv=bq, block_kv_dkv=bk, block_q_dq=bq, block_kv_dq=bk
    )
    return splash_attention.make_splash_mha(
        splash_attention.MultiHeadMask([mask] * num_heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name="attended",
        interpret=interpret,
    )


def _with_sequence(kernel: Any, sequence_T: Array | None) -> Any:
    """The kernel for rows whose documents begin elsewhere than all at the first token."""
    if sequence_T is None:
        return kernel
    infos = (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info)
    return type(kernel)(*(info._replace(q_sequence=sequence_T) for info in infos), **kernel.kwargs)
