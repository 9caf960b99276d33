"""A random policy whose completions end when they are told to.

How many tokens a completion has, the end-of-sequence token included, is looked up by its first token. A slot keeps
that number beside its keys and values. The last coordinate of a hidden state is -1, or 1 where the completion is
due to end, and the output matrix knows the end-of-sequence token by this coordinate alone. All other logits are a
decoder's own.

P prompts or rows, G completions or slots, T tokens, D width, V vocabulary (see grpo_jax/types.py).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import jax.numpy as jnp
import numpy as np

from grpo_jax.mesh import GROUP_AXES, constrain
from grpo_jax.models.config import DecoderConfig
from grpo_jax.models.decoder import Decoder, init_params
from grpo_jax.types import Array, Cache, Params, Prefix

EOS = 0

# exp of its negative is 0 in float32: the end is either impossible or certain.
_CERTAIN = 1e4


def lognormal_lengths(count: int, *, median: float, sigma: float, cap: int, seed: int) -> np.ndarray:
    """The quantiles of a lognormal distribution as whole numbers from 2 to ``cap``, in random order."""
    normal = NormalDist()
    z = np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
    lengths = np.clip(np.rint(median * np.exp(sigma * z)), 2, cap).astype(np.int32)
    return np.random.default_rng(seed).permutation(lengths)


def forced_params(config: DecoderConfig, length_V: np.ndarray, key: Array) -> Params:
    """A random decoder, and ``length_V``: tokens of a completion that begins with each token.

    Raises:
        ValueError: a length below 2 (the first token is not the last), or embeddings that are the output matrix.
    """
    if length_V.min() < 2:
        raise ValueError(f"length_V must be at least 2, got {length_V.min()}: the first token tells the length")
    if config.tie_embeddings:
        raise ValueError("config.tie_embeddings must be False: the output matrix has a column of its own use")
    decoder = init_params(config, key)
    ends_V = jnp.zeros(config.vocab_size).at[EOS].set(_CERTAIN)
    return {
        "decoder": decoder | {"head": decoder["head"].at[:, -1].set(ends_V)},
        "length_V": jnp.asarray(length_V),
    }


@dataclass(frozen=True)
class ForcedLengths:
    """The functions of :class:`grpo_jax.types.Model`; ``params`` are those of :func:`forced_params`."""

    decoder: Decoder

    @property
    def vocab_size(self) -> int:
        """Width of the output matrix."""
        return self.decoder.vocab_size

    def prefill(self, params: Params, prompt_PS: Array, prompt_mask_PS: Array) -> Prefix:
        """Run the prompts; no completion ends with its first token."""
        prefix = self.decoder.prefill(params["decoder"], prompt_PS, prompt_mask_PS)
        return dataclasses.replace(prefix, hidden_PD=prefix.hidden_PD.at[:, -1].set(-1))

    def extend(
        self,
        params: Params,
        tokens_PGT: Array,
        prefix: Prefix,
        cache: Cache | None = None,
        place_PGT: Array | None = None,
    ) -> tuple[Array, Any]:
        """Run completion tokens, one completion a row; ``new_kv`` also has each completion's length."""
        assert place_PGT is None, "several completions a row have no single length"
        first_PG = params["length_V"][tokens_PGT[:, :, 0]]
        if cache is None:
            length_PG, held_PG, inner = first_PG, jnp.zeros_like(first_PG), None
        else:
            kv, kept_PG = cache.kv
            held_PG, inner = cache.length_RC, dataclasses.replace(cache, kv=kv)
            length_PG = jnp.where(held_PG == 0, first_PG, kept_PG)
        hidden_PGTD, new_kv = self.decoder.extend(params["decoder"], tokens_PGT, prefix, inner)
        # Hidden state t of these predicts token number held + t + 2 of the completion.
        number_PGT = held_PG[..., None] + jnp.arange(tokens_PGT.shape[2])[None, None] + 2
        end_PGT = jnp.where(number_PGT >= length_PG[..., None], 1, -1).astype(hidden_PGTD.dtype)
        return hidden_PGTD.at[..., -1].set(end_PGT), (new_kv, length_PG)

    def unstack(self, params: Params, prefix: Prefix) -> tuple[Params, Prefix]:
        """The form that a loop over single tokens reads fastest."""
        decoder, prefix = self.decoder.unstack(params["decoder"], prefix)
        return params | {"decoder": decoder}, prefix

    def init_cache(self, params: Params, num_rows: int, num_slots: int, capacity: int) -> Any:
        """The decoder's, and the length of each slot's completion."""
        length_RC = constrain(jnp.zeros((num_rows, num_slots), jnp.int32), GROUP_AXES)
        return self.decoder.init_cache(params["decoder"], num_rows, num_slots, capacity), length_RC

    def grow_cache(self, cache_kv: Any, capacity: int) -> Any:
        """The decoder's with more columns."""
        return self.decoder.grow_cache(cache_kv[0], capacity), cache_kv[1]

    def append(self, cache_kv: Any, new_kv: Any, column: Array) -> Any:
        """Write one token a slot; the lengths are of the completion, not of a token."""
        return self.decoder.append(cache_kv[0], new_kv[0], column), new_kv[1]

    def head(self, params: Params) -> Array:
        """The output matrix."""
        return self.decoder.head(params["decoder"])
