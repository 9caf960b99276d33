"""One decoder for the Llama and Qwen2 families, with the group as an axis of its own.

Shapes (see grpo_jax/types.py): P prompts, G completions of a prompt, S keys of a segment, T tokens, D model
width, F feed-forward width, K key-value heads, Q query heads of one key-value head, H head width, L layers, V
vocabulary; R and C are rows and slots of the cache.

Flax NNX declares the parameters and their logical axes; everything else is functions of a nested dictionary.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from grpo_jax.mesh import constrain
from grpo_jax.models.attention import attend
from grpo_jax.models.config import DecoderConfig, rope_frequencies
from grpo_jax.models.kernels import is_cudnn
from grpo_jax.models.kv import KV, Context
from grpo_jax.models.products import project, swiglu
from grpo_jax.types import Array, Cache, Params, Prefix

# Without rematerialization so few layers are compiled one by one: a loop has to write what the backward pass needs
# into a stack, and to cut it out again. More of them would take longer to compile, and more memory.
_UNROLLED_LAYERS = 4


class _Layer(nnx.Module):
    """The parameters of one layer.

    Queries, keys and values are one matrix, laid out so that each key-value head carries its own queries: one
    product a token instead of three, and splitting K over devices keeps whole heads together. Gate and up
    are two: their outputs are so wide that reading halves of one costs more than the second product saves.
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
        self.gate = _normal(rngs, 0.02, (D, F), ("embed", "mlp"))
        self.up = _normal(rngs, 0.02, (D, F), ("embed", "mlp"))
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
        mask_PS = prompt_mask_PS.astype(jnp.bool)
        position_PS = jnp.maximum(jnp.cumsum(mask_PS, axis=1) - 1, 0)
        # The prompts pass through the layers as groups of one, their padding as a document of its own.
        hidden_P1SD, kv = self._run_layers(
            params,
            prompt_PS[:, None],
            position_PS[:, None],
            mask_PS[:, None].astype(jnp.int32),
            (),
            ("prompts", None),
        )
        return Prefix(
            kv=jax.tree.map(lambda x: x[:, :, :, 0], kv),
            mask_PS=mask_PS,
            length_P=mask_PS.sum(axis=1, dtype=jnp.int32),
            hidden_PD=hidden_P1SD[:, 0, -1],
        )

    def extend(
        self,
        params: Params,
        tokens_PGT: Array,
        prefix: Prefix,
        cache: Cache | None = None,
        place_PGT: Array | None = None,
    ) -> tuple[Array, Any]:
        """Run completion tokens after their prefix (and cache).

        Args:
            params: all parameters.
            tokens_PGT: token ids.
            prefix: of the prompts.
            cache: what each slot has produced before.
            place_PGT: int; each token's place in its completion, for rows that hold several completions one after
                the other: another begins wherever it is 0. None: one a row.

        Returns:
            ``(hidden_PGTD, new_kv)``: the hidden states after the final norm, and the keys and values of
            ``tokens_PGT`` for :meth:`append`, ``[L, P, K, G, T, H]`` or, unstacked, a layer apart.
        """
        document_PGT = None
        if place_PGT is None:
            place_PGT = jnp.broadcast_to(jnp.arange(tokens_PGT.shape[2])[None, None], tokens_PGT.shape)
        else:
            document_PGT = jnp.cumsum(place_PGT == 0, axis=2)
        position_PGT = prefix.length_P[:, None, None] + place_PGT
        context: tuple[Context, ...] = (Context(prefix.kv, prefix.mask_PS),)
        if cache is not None:
            position_PGT = position_PGT + cache.length_RC[..., None]
            context = (*context, Context(cache.kv, cache.mask_RCT))
        return self._run_layers(params, tokens_PGT, position_PGT, document_PGT, context, ("prompts", "group"))

    def unstack(self, params: Params, prefix: Prefix) -> tuple[Params, Prefix]:
        """The same with each layer's arrays apart and in the compute dtype, for a loop over single tokens.

        A scan over layers has to cut each layer's weights out of the stack, at every token.
        """

        def apart(tree: Any) -> tuple[Any, ...]:
            return tuple(jax.tree.map(operator.itemgetter(i), tree) for i in range(self.config.num_layers))

        layers = jax.tree.map(lambda w: w.astype(self.config.compute_dtype), params["layers"])
        return params | {"layers": apart(layers)}, dataclasses.replace(prefix, kv=apart(prefix.kv))

    def init_cache(self, params: Params, num_rows: int, num_slots: int, capacity: int) -> Any:
        """Zeros for the keys and values of ``capacity`` tokens in each of ``[num_rows, num_slots]``.

        Of all layers in one array if ``params`` are stacked, ``[L, R, K, C, capacity, H]``, else a layer apart.
        """
        c = self.config
        shape = (num_rows, c.num_kv_heads, num_slots, capacity, c.head_width)
        axes = ("prompts", "kv_heads", "group", None, None)

        def zeros(*layers: int) -> Array:
            return constrain(jnp.zeros((*layers, *shape), c.compute_dtype), (*(None,) * len(layers), *axes))

        if isinstance(params["layers"], tuple):
            return tuple(KV(k=zeros(), v=zeros()) for _ in range(c.num_layers))
        return KV(k=zeros(c.num_layers), v=zeros(c.num_layers))

    def grow_cache(self, cache_kv: Any, capacity: int) -> Any:
        """The same with zeros up to ``capacity`` columns."""

        def grow(x: Array) -> Array:
            return jnp.pad(x, [(0, capacity - x.shape[-2] if axis == x.ndim - 2 else 0) for axis in range(x.ndim)])

        return jax.tree.map(grow, cache_kv)

    def append(self, cache_kv: Any, new_kv: Any, column: Array) -> Any:
        """Write the keys and values of one token a slot at ``column`` of the ring."""
        return jax.tree.map(
            lambda ring, new: jax.lax.dynamic_update_slice_in_dim(ring, new, column, axis=ring.ndim - 2),
            cache_kv,
            new_kv,
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
        document_PGT: Array | None,
        context: tuple[Context, ...],
        batch_axes: tuple[str | None, str | None],
    ) -> tuple[Array, Any]:
        """Embedding, layers and final norm.

        Args:
            params: all parameters.
            tokens_PGT: token ids.
            position_PGT: their positions.
            document_PGT: as :func:`attend` takes it.
            context: keys and values ``[L, ...]`` of earlier tokens, with their masks.
            batch_axes: logical names of P and G.
        """
        config = self.config
        axes = (*batch_axes, None, None)
        rotation = _rotation(position_PGT, config)

        def layer(x_PGTD: Array, inputs: tuple[Params, tuple[KV, ...]]) -> tuple[Array, KV]:
            weights, context_kv = inputs
            seen = tuple(Context(kv, c.mask) for kv, c in zip(context_kv, context, strict=True))
            q_PKGTQH, new_kv = _queries_keys_values(weights, x_PGTD, rotation, config)
            attended_PKGTQH = attend(
                q_PKGTQH, new_kv, document_PGT, seen, batch_axes=batch_axes, kernel=config.attention
            )
            attended_PGTD = project(jnp.einsum("pkgtqh->pgtkqh", attended_PKGTQH), weights["out"], 3)
            x_PGTD = constrain(x_PGTD + attended_PGTD, axes)
            x_PGTD = constrain(x_PGTD + _feed_forward(weights, x_PGTD, config), axes)
            return x_PGTD, new_kv

        x_PGTD = jnp.take(params["embed"], tokens_PGT, axis=0, mode="clip").astype(config.compute_dtype)
        x_PGTD = constrain(x_PGTD, axes)
        context_kv: Any = tuple(kv for kv, _ in context)
        if isinstance(params["layers"], tuple):
            new_kvs = []
            for i, weights in enumerate(params["layers"]):
                x_PGTD, new_kv = layer(x_PGTD, (weights, tuple(kv[i] for kv in context_kv)))
                new_kvs.append(new_kv)
            return _rms_norm(x_PGTD, params["norm"], config.norm_eps), tuple(new_kvs)
        # Weights are stored in float32 and used in the compute dtype.
        weights = jax.tree.map(lambda w: w.astype(config.compute_dtype), params["layers"])
        x_PGTD, new_kv = _scan_layers(layer, x_PGTD, (weights, context_kv), config)
        return _rms_norm(x_PGTD, params["norm"], config.norm_eps), new_kv


def _scan_layers(layer: Any, x_PGTD: Array, inputs: Any, config: DecoderConfig) -> tuple[Array, KV]:
    """``layer`` after layer, with less kept for the backward pass than all that it computes."""
    if config.remat == "none":
        return jax.lax.scan(layer, x_PGTD, inputs, unroll=config.num_layers <= _UNROLLED_LAYERS)
    k = config.remat_every
    policies = jax.checkpoint_policies
    policy = policies.save_from_both_policies(policies.save_only_these_names("product", "attended"), is_cudnn)

    # A scan's body is compiled by itself: nothing outside could be merged with the recomputation.
    @functools.partial(jax.checkpoint, policy=policy if config.remat == "dots" else None, prevent_cse=False)
    def some_layers(x_PGTD: Array, inputs: Any) -> tuple[Array, KV]:
        return jax.lax.scan(layer, x_PGTD, inputs) if k > 1 else layer(x_PGTD, inputs)

    if k == 1:
        return jax.lax.scan(some_layers, x_PGTD, inputs)
    x_PGTD, new_kv = jax.lax.scan(
        some_layers, x_PGTD, jax.tree.map(lambda w: w.reshape(-1, k, *w.shape[1:]), inputs)
    )
    return x_PGTD, jax.tree.map(lambda w: w.reshape(-1, *w.shape[2:]), new_kv)


def _queries_keys_values(
    weights: Params, x_PGTD: Array, rotation: tuple[Array, Array], config: DecoderConfig
) -> tuple[Array, KV]:
    """Rotated queries ``[P, K, G, T, Q, H]``, rotated keys and values ``[P, K, G, T, H]`` of the tokens."""
    Q = config.queries_per_kv
    x_PGTD = _rms_norm(x_PGTD, weights["attn_norm"], config.norm_eps)
    qkv = project(x_PGTD, weights["qkv"])
    if config.qkv_bias:
        qkv = qkv + weights["qkv_bias"][None, None, None]
    qk = _rotate(qkv[..., : Q + 1, :], rotation)
    return jnp.einsum("pgtkqh->pkgtqh", qk[..., :Q, :]), KV(
        k=jnp.einsum("pgtkh->pkgth", qk[..., Q, :]),
        v=jnp.einsum("pgtkh->pkgth", qkv[..., Q + 1, :]),
    )


def _feed_forward(weights: Params, x_PGTD: Array, config: DecoderConfig) -> Array:
    """What the feed-forward layer adds to the residual stream."""
    x_PGTD = _rms_norm(x_PGTD, weights["mlp_norm"], config.norm_eps)
    gated_PGTF = swiglu(project(x_PGTD, weights["gate"]), project(x_PGTD, weights["up"]))
    return project(gated_PGTF, weights["down"])


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
