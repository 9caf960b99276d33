"""One decoder for the Llama and Qwen2 families, with the group as an axis of its own.

Shapes (see grpo_jax/types.py): P prompts, G completions of a prompt, S keys of a segment, T tokens, D model
width, F feed-forward width, K key-value heads, Q query heads of one key-value head, H head width, L layers, V
vocabulary; R and C are rows and slots of the cache.

Flax NNX declares the parameters and their logical axes; everything else is functions of a nested dictionary.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from grpo_jax.mesh import constrain
from grpo_jax.models.config import DecoderConfig, rope_frequencies
from grpo_jax.types import Array, Cache, Params, Prefix

# Finite, so that a row of nothing but masked keys gives an average and not a NaN.
_MASKED = float(jnp.finfo(jnp.float32).min) / 2


class _Layer(nnx.Module):
    """The parameters of one layer.

    Queries, keys and values are one matrix, laid out so that each key-value head carries its own queries: one
    product a token instead of three, and splitting K over devices keeps whole heads together. Gate and up
    are one matrix with an axis of 2 for the same reason; F is split within each.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs) -> None:
        D, F, K, H = config.width, config.ffn_width, config.num_kv_heads, config.head_width
        Q = config.queries_per_kv
        # Two residual branches a layer: their sum keeps the scale of one.
        small = 0.02 / (2 * config.num_layers) ** 0.5
        self.attn_norm = _ones(D)
        self.qkv = _normal(rngs, 0.02, (D, K, Q + 2, H), ("embed", "kv_heads", None, None))
        if config.qkv_bias:
            self.qkv_bias = nnx.Param(jnp.zeros((K, Q + 2, H)), out_sharding=("kv_heads", None, None))
        self.out = _normal(rngs, small, (K, Q, H, D), ("kv_heads", None, None, "embed"))
        self.mlp_norm = _ones(D)
        self.gate_up = _normal(rngs, 0.02, (D, 2, F), ("embed", None, "mlp"))
        self.down = _normal(rngs, small, (F, D), ("mlp", "embed"))


class _Declaration(nnx.Module):
    """All parameters; the layers are stacked on their first axis."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs) -> None:
        V, D = config.vocab_size, config.width
        self.embed = _normal(rngs, 0.02, (V, D), ("vocab", "embed"))

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def make_layer(rngs: nnx.Rngs) -> _Layer:
            return _Layer(config, rngs)

        self.layers = make_layer(rngs)
        self.norm = _ones(D)
        if not config.tie_embeddings:
            self.head = _normal(rngs, 0.02, (V, D), ("vocab", "embed"))


def _normal(rngs: nnx.Rngs, std: float, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param[Array]:
    return nnx.Param(std * jax.random.normal(rngs.params(), shape), out_sharding=axes)


def _ones(width: int) -> nnx.Param[Array]:
    return nnx.Param(jnp.ones((width,)), out_sharding=(None,))


def init_params(config: DecoderConfig, key: Array) -> Params:
    """Random float32 parameters: a nested dictionary, the leaves of ``layers`` stacked ``[L, ...]``."""
    # Logical names are no mesh axes: Flax must not try to place arrays by them.
    with nnx.use_eager_sharding(False):
        module = _Declaration(config, nnx.Rngs(params=key))
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def logical_axes(config: DecoderConfig) -> Any:
    """The names of each parameter's axes, in the structure of :func:`init_params`."""
    with nnx.use_eager_sharding(False):
        # JAX's own eval_shape: under a mesh, that of Flax takes the names for mesh axes.
        abstract = jax.eval_shape(lambda: nnx.state(_Declaration(config, nnx.Rngs(params=0)), nnx.Param))
    flat = nnx.to_flat_state(abstract)
    axes = {path: param.get_metadata("out_sharding") for path, param in flat}
    return nnx.traversals.unflatten_mapping(axes)


class KV(NamedTuple):
    """Keys, rotated to their positions, and values: ``[P, K, S, H]`` or ``[P, G, K, S, H]``."""

    k: Array
    v: Array


@dataclass(frozen=True)
class Decoder:
    """The functions of :class:`grpo_jax.types.Model` for one configuration."""

    config: DecoderConfig

    @property
    def vocab_size(self) -> int:
        """Width of the output matrix."""
        return self.config.vocab_size

    def prefill(self, params: Params, prompt_PS: Array, prompt_mask_PS: Array) -> Prefix:
        """Run the left-padded prompts once.

        Positions count real tokens only, and no token attends to padding.
        """
        S = prompt_PS.shape[1]
        mask_PS = prompt_mask_PS.astype(jnp.bool)
        position_PS = jnp.maximum(jnp.cumsum(mask_PS, axis=1) - 1, 0)
        mask_P1SS = jnp.tril(jnp.ones((1, 1, S, S), jnp.bool)) & mask_PS[:, None, None]
        # The prompts pass through the layers as groups of one.
        hidden_P1SD, kv = self._run_layers(
            params, prompt_PS[:, None], position_PS[:, None], mask_P1SS, [], ("prompts", None)
        )
        return Prefix(
            kv=jax.tree.map(lambda x: x[:, :, 0], kv),
            mask_PS=mask_PS,
            length_P=mask_PS.sum(axis=1, dtype=jnp.int32),
            hidden_PD=hidden_P1SD[:, 0, -1],
        )

    def extend(
        self, params: Params, tokens_PGT: Array, prefix: Prefix, cache: Cache | None = None
    ) -> tuple[Array, KV]:
        """Run completion tokens after their prefix (and cache).

        Returns:
            ``(hidden_PGTD, new_kv)``: the hidden states after the final norm, and the keys and values of
            ``tokens_PGT`` for :meth:`append`, ``[L, P, G, K, T, H]``.
        """
        T = tokens_PGT.shape[2]
        position_PGT = prefix.length_P[:, None, None] + jnp.arange(T)[None, None]
        position_PGT = jnp.broadcast_to(position_PGT, tokens_PGT.shape)
        context = [(prefix.kv, prefix.mask_PS[:, None, None])]
        if cache is not None:
            position_PGT = position_PGT + cache.length_RC[..., None]
            context.append((cache.kv, cache.mask_RCT[:, :, None]))
        causal_TT = jnp.tril(jnp.ones((1, 1, T, T), jnp.bool))
        return self._run_layers(params, tokens_PGT, position_PGT, causal_TT, context, ("prompts", "group"))

    def init_cache(self, params: Params, num_rows: int, num_slots: int, capacity: int) -> KV:
        """Zeros for the keys and values of ``capacity`` tokens in each of ``[num_rows, num_slots]``."""
        c = self.config
        shape = (c.num_layers, num_rows, num_slots, c.num_kv_heads, capacity, c.head_width)
        axes = (None, "prompts", "group", "kv_heads", None, None)
        zeros = constrain(jnp.zeros(shape, c.compute_dtype), axes)
        return KV(k=zeros, v=zeros)

    def append(self, cache_kv: KV, new_kv: KV, column: Array) -> KV:
        """Write the keys and values of one token a slot at ``column`` of the ring."""
        # One slice over all layers, so that a loop can update the cache in place.
        return jax.tree.map(
            lambda ring, new: jax.lax.dynamic_update_slice_in_dim(ring, new, column, axis=4), cache_kv, new_kv
        )

    def head(self, params: Params) -> Array:
        """The output matrix ``head_VD``, in the compute dtype."""
        name = "embed" if self.config.tie_embeddings else "head"
        return params[name].astype(self.config.compute_dtype)

    def _run_layers(
        self,
        params: Params,
        tokens_PGT: Array,
        position_PGT: Array,
        self_mask_PGTT: Array,
        context: list[tuple[KV, Array]],
        batch_axes: tuple[str | None, str | None],
    ) -> tuple[Array, KV]:
        """Embedding, layers and final norm.

        Args:
            params: all parameters.
            tokens_PGT: token ids.
            position_PGT: their positions.
            self_mask_PGTT: which of the tokens each attends to.
            context: keys and values ``[L, ...]`` of earlier tokens, each with its mask ``[P, G, 1, S]``.
            batch_axes: logical names of P and G.
        """
        config = self.config
        axes = (*batch_axes, None, None)
        rotation = _rotation(position_PGT, config)
        masks = [mask for _, mask in context]

        def layer(x_PGTD: Array, inputs: tuple[Params, list[KV]]) -> tuple[Array, KV]:
            weights, context_kv = inputs
            segments = list(zip(context_kv, masks, strict=True))
            branch_PGTD, new_kv = _attention_block(weights, x_PGTD, rotation, self_mask_PGTT, segments, config)
            x_PGTD = constrain(x_PGTD + branch_PGTD, axes)
            x_PGTD = constrain(x_PGTD + _mlp_block(weights, x_PGTD, config), axes)
            return x_PGTD, new_kv

        x_PGTD = jnp.take(params["embed"], tokens_PGT, axis=0, mode="clip").astype(config.compute_dtype)
        # Weights are stored in float32 and used in the compute dtype. Converted all at once, so that a loop
        # over tokens converts them before it starts and reads the narrow ones.
        weights = jax.tree.map(lambda w: w.astype(config.compute_dtype), params["layers"])
        x_PGTD, new_kv = jax.lax.scan(
            _remat(layer, config.remat), constrain(x_PGTD, axes), (weights, [kv for kv, _ in context])
        )
        return _rms_norm(x_PGTD, params["norm"], config.norm_eps), new_kv


def _remat(layer: Any, remat: str) -> Any:
    """``layer`` with less kept for the backward pass."""
    if remat == "none":
        return layer
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if remat == "dots" else None
    # A scan's body is compiled by itself: nothing outside could be merged with the recomputation.
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)


def _attention_block(
    weights: Params,
    x_PGTD: Array,
    rotation: tuple[Array, Array],
    self_mask_PGTT: Array,
    segments: list[tuple[KV, Array]],
    config: DecoderConfig,
) -> tuple[Array, KV]:
    """What attention adds to the residual stream, and the keys and values of the tokens."""
    Q = config.queries_per_kv
    x_PGTD = _rms_norm(x_PGTD, weights["attn_norm"], config.norm_eps)
    qkv = jnp.einsum("pgtd,dkqh->pgtkqh", x_PGTD, weights["qkv"])
    if config.qkv_bias:
        qkv = qkv + weights["qkv_bias"][None, None, None]
    qk = _rotate(qkv[..., : Q + 1, :], rotation)
    new_kv = KV(
        k=jnp.einsum("pgtkh->pgkth", qk[..., Q, :]),
        v=jnp.einsum("pgtkh->pgkth", qkv[..., Q + 1, :]),
    )
    attended_PGTKQH = attend(qk[..., :Q, :], [*segments, (new_kv, self_mask_PGTT)])
    return jnp.einsum("pgtkqh,kqhd->pgtd", attended_PGTKQH, weights["out"]), new_kv


def _mlp_block(weights: Params, x_PGTD: Array, config: DecoderConfig) -> Array:
    """What the feed-forward layer adds to the residual stream."""
    x_PGTD = _rms_norm(x_PGTD, weights["mlp_norm"], config.norm_eps)
    gate_up = jnp.einsum("pgtd,dcf->pgtcf", x_PGTD, weights["gate_up"])
    return jnp.einsum("pgtf,fd->pgtd", jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :], weights["down"])


def attend(q_PGTKQH: Array, segments: list[tuple[KV, Array]]) -> Array:
    """Softmax attention over the keys of several segments, never put together into one array.

    A segment ``[P, K, S, H]`` is shared by the group: its queries are the ``G*T*Q`` rows of one matrix
    product a prompt and head. A segment ``[P, G, K, S, H]`` is each completion's own. The segments' scores
    are merged by their common maximum and denominator, in float32.

    Args:
        q_PGTKQH: queries, rotated.
        segments: keys and values, each with a mask that broadcasts to ``[P, G, T, S]``.

    Returns:
        Attended values ``[P, G, T, K, Q, H]``.
    """
    scores = [_scores(q_PGTKQH, kv, mask) for kv, mask in segments]
    # A constant shift cancels in the quotient: no gradient through the maximum.
    peaks = [_own(s.max(axis=-1, initial=_MASKED), kv) for s, (kv, _) in zip(scores, segments, strict=True)]
    peak_PGKTQ = jax.lax.stop_gradient(functools.reduce(jnp.maximum, peaks))
    total_PGKTQ = jnp.zeros_like(peak_PGKTQ)
    out_PGKTQH = jnp.zeros((), jnp.float32)
    for s, (kv, _) in zip(scores, segments, strict=True):
        weights = jnp.exp(s - _own(peak_PGKTQ, kv)[..., None])
        total_PGKTQ = total_PGKTQ + _own(weights.sum(axis=-1), kv)
        equation = "pkgtqs,pksh->pkgtqh" if _is_shared(kv) else "pgktqs,pgksh->pgktqh"
        out = jnp.einsum(equation, weights.astype(kv.v.dtype), kv.v, preferred_element_type=jnp.float32)
        out_PGKTQH = out_PGKTQH + _own(out, kv)
    out_PGKTQH = out_PGKTQH / total_PGKTQ[..., None]
    return jnp.einsum("pgktqh->pgtkqh", out_PGKTQH).astype(q_PGTKQH.dtype)


def _scores(q_PGTKQH: Array, kv: KV, mask_PGTS: Array) -> Array:
    """Scaled and masked scores in float32: ``[P, K, G, T, Q, S]`` if shared, else ``[P, G, K, T, Q, S]``."""
    shared = _is_shared(kv)
    equation = "pgtkqh,pksh->pkgtqs" if shared else "pgtkqh,pgksh->pgktqs"
    scores = jnp.einsum(equation, q_PGTKQH, kv.k, preferred_element_type=jnp.float32)
    mask = mask_PGTS[:, None, :, :, None] if shared else mask_PGTS[:, :, None, :, None]
    return jnp.where(mask, scores * q_PGTKQH.shape[-1] ** -0.5, _MASKED)


def _is_shared(kv: KV) -> bool:
    """Whether the segment has no axis G."""
    return kv.k.ndim == 4


def _own(x: Array, kv: KV) -> Array:
    """From a segment's order of axes to ``[P, G, K, ...]``, and back: shared segments have K before G."""
    return jnp.swapaxes(x, 1, 2) if _is_shared(kv) else x


def _rotation(position_PGT: Array, config: DecoderConfig) -> tuple[Array, Array]:
    """Cosine and sine of each position's angles, ``[P, G, T, H/2]``."""
    frequencies = jnp.asarray(rope_frequencies(config), jnp.float32)
    angle = position_PGT[..., None].astype(jnp.float32) * frequencies[None, None, None]
    return jnp.cos(angle), jnp.sin(angle)


def _rotate(x_PGTKQH: Array, rotation: tuple[Array, Array]) -> Array:
    """Rotary positions: component i turns together with component i + H/2, in float32."""
    cos, sin = (r[..., None, None, :] for r in rotation)
    a, b = jnp.split(x_PGTKQH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_PGTKQH.dtype)


def _rms_norm(x_PGTD: Array, scale_D: Array, eps: float) -> Array:
    """Each token's vector over its root mean square, in float32."""
    x = x_PGTD.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return (x * scale_D.astype(jnp.float32)[None, None, None]).astype(x_PGTD.dtype)
