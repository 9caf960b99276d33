"""The decoder against itself: every way of running the same tokens gives the same answer."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.config import MeshConfig, ModelConfig
from grpo_jax.mesh import make_mesh, partition_spec, place_params
from grpo_jax.models.config import DecoderConfig, RopeScaling, rope_frequencies
from grpo_jax.models.decoder import Decoder, init_params, logical_axes
from grpo_jax.types import Array, Cache, Params, Prefix

CONFIG = DecoderConfig(
    vocab_size=40,
    num_layers=2,
    width=32,
    ffn_width=48,
    num_heads=8,
    num_kv_heads=4,
    head_width=6,
    rope_theta=100.0,
    norm_eps=1e-5,
    qkv_bias=True,
    tie_embeddings=False,
)
# Sums of up to 48 float32 products around 1, in another order: a few units of 6e-8 each, through two layers.
ROUNDING = {"rtol": 2e-5, "atol": 5e-6}
P, G, S, T = 4, 4, 6, 5


@functools.cache
def loud_params(config: DecoderConfig = CONFIG) -> Params:
    """Weights ten times as large as those of a new model, and biases: every part has a say in the result."""
    params = init_params(config, jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [x + 0.2 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, noisy)


def batch() -> tuple[Array, Array, Array]:
    """Prompts with 0 to 3 pads on the left, and their completions."""
    prompt_PS = jax.random.randint(jax.random.key(2), (P, S), 0, CONFIG.vocab_size)
    mask_PS = jnp.arange(S)[None] >= jnp.arange(P)[:, None]
    completion_PGT = jax.random.randint(jax.random.key(3), (P, G, T), 0, CONFIG.vocab_size)
    return prompt_PS, mask_PS, completion_PGT


def run(model: Decoder, params: Params, *inputs: Array) -> tuple[Array, Array]:
    """The hidden states of the prompts' last tokens and of the completions, each prompt run once."""
    prompt_PS, mask_PS, completion_PGT = inputs
    prefix = model.prefill(params, prompt_PS, mask_PS)
    hidden_PGTD, _ = model.extend(params, completion_PGT, prefix)
    return prefix.hidden_PD, hidden_PGTD


@functools.partial(jax.jit, static_argnums=0)
def run_jit(model: Decoder, params: Params, *inputs: Array) -> tuple[Array, Array]:
    return run(model, params, *inputs)


def run_unshared(model: Decoder, params: Params, *inputs: Array) -> tuple[Array, Array]:
    """The same, each completion with its own prompt as one sequence after a prefix of padding only."""
    prompt_PS, mask_PS, completion_PGT = inputs
    nothing_11 = jnp.zeros((1, 1), jnp.int32)
    empty = model.prefill(params, nothing_11, nothing_11.astype(bool))
    lasts, hiddens = [], []
    for p, length in enumerate(np.asarray(mask_PS).sum(axis=1)):
        prompt_GS = jnp.tile(prompt_PS[p : p + 1, S - length :], (G, 1))
        sequence_1GX = jnp.concatenate([prompt_GS, completion_PGT[p]], axis=1)[None]
        hidden_GXD = model.extend(params, sequence_1GX, empty)[0][0]
        lasts.append(hidden_GXD[0, length - 1])
        hiddens.append(hidden_GXD[:, length:])
    return jnp.stack(lasts), jnp.stack(hiddens)


def two_prompts() -> tuple[Array, ...]:
    """The prompts of the batch that have no padding and the most of it."""
    return tuple(x[np.array([0, 3])] for x in batch())


def scalar(hiddens: tuple[Array, Array]) -> Array:
    """A loss in which every hidden state counts differently."""
    last_PD, hidden_PGTD = hiddens
    weights = jax.random.normal(jax.random.key(4), hidden_PGTD.shape)
    return jnp.sum(jnp.sin(last_PD)) + jnp.sum(weights * hidden_PGTD)


def assert_trees_close(actual: Any, expected: Any, **tolerance: float) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, err_msg=jax.tree_util.keystr(path), **tolerance)


def test_shared_prefix_and_its_gradient_equal_one_sequence() -> None:
    model, params = Decoder(CONFIG), loud_params()
    inputs = two_prompts()

    def outputs_and_grad(runner: Any) -> tuple[Any, Any]:
        def loss(p: Params) -> tuple[Array, Any]:
            hiddens = runner(model, p, *inputs)
            return scalar(hiddens), hiddens

        grads, hiddens = jax.jit(jax.grad(loss, has_aux=True))(params)
        return hiddens, grads

    hiddens, grads = outputs_and_grad(run)
    expected_hiddens, expected_grads = outputs_and_grad(run_unshared)
    assert_trees_close(hiddens, expected_hiddens, **ROUNDING)
    # Gradients are sums over up to 60 tokens, of size up to 100: the rounding grows with both.
    assert_trees_close(grads, expected_grads, rtol=1e-4, atol=5e-4)

    def cut(p: Params) -> Array:
        prompt_PS, mask_PS, completion_PGT = inputs
        prefix = jax.lax.stop_gradient(model.prefill(p, prompt_PS, mask_PS))
        return scalar((prefix.hidden_PD, model.extend(p, completion_PGT, prefix)[0]))

    # The comparison above would notice a prefix that no gradient passes.
    difference = grads["layers"]["qkv"] - jax.jit(jax.grad(cut))(params)["layers"]["qkv"]
    assert np.abs(difference).max() > 1


def test_padding_does_not_change_anything() -> None:
    model, params = Decoder(CONFIG), loud_params()
    prompt_PS, mask_PS, completion_PGT = batch()
    more = jnp.full((P, 7), 3, prompt_PS.dtype)  # a real token's id, as where the pad id is the EOS id
    padded = jnp.concatenate([more, prompt_PS], axis=1), jnp.concatenate([more < 0, mask_PS], axis=1)
    assert_trees_close(
        run_jit(model, params, *padded, completion_PGT),
        run_jit(model, params, prompt_PS, mask_PS, completion_PGT),
        **ROUNDING,
    )


def test_tokens_see_only_what_came_before() -> None:
    model, params = Decoder(CONFIG), loud_params()
    prompt_PS, mask_PS, completion_PGT = batch()
    before = run_jit(model, params, prompt_PS, mask_PS, completion_PGT)
    changed = completion_PGT.at[1, 2, 3].add(1) % CONFIG.vocab_size
    after = run_jit(model, params, prompt_PS, mask_PS, changed)
    differs_PGT = jnp.any(before[1] != after[1], axis=-1)
    expected = np.zeros((P, G, T), bool)
    expected[1, 2, 3:] = True
    np.testing.assert_array_equal(differs_PGT, expected)
    np.testing.assert_array_equal(before[0], after[0])


def decode(
    model: Decoder, params: Params, prefix: Prefix, completion_PGT: Array, *, first_column: int, capacity: int
) -> Array:
    """One token at a time through a ring that starts at ``first_column``, as a rollout does it."""
    rows, slots, steps = completion_PGT.shape

    def step(kv: Any, t: Array) -> tuple[Any, Array]:
        column = (first_column + t) % capacity
        # The columns of the last t steps; what else is in the ring belongs to nobody.
        age_T = (column - 1 - jnp.arange(capacity)) % capacity
        mask_PGT = jnp.broadcast_to(age_T[None, None] < t, (rows, slots, capacity))
        cache = Cache(kv=kv, mask_RCT=mask_PGT, length_RC=jnp.full((rows, slots), t))
        token_PG1 = jax.lax.dynamic_slice_in_dim(completion_PGT, t, 1, axis=2)
        hidden_PG1D, new_kv = model.extend(params, token_PG1, prefix, cache)
        return model.append(kv, new_kv, column), hidden_PG1D[:, :, 0]

    # Left-overs of earlier completions, which the mask has to hide.
    kv = jax.tree.map(lambda x: x + 3, model.init_cache(params, rows, slots, capacity))
    hiddens = jax.jit(lambda kv: jax.lax.scan(step, kv, jnp.arange(steps))[1])(kv)
    return jnp.moveaxis(hiddens, 0, 2)


@pytest.mark.parametrize("unstacked", [False, True])
@pytest.mark.parametrize(("first_column", "capacity"), [(0, 5), (0, 9), (3, 5), (6, 7)])
def test_decoding_through_the_ring_equals_one_pass(first_column: int, capacity: int, unstacked: bool) -> None:
    model, params = Decoder(CONFIG), loud_params()
    prompt_PS, mask_PS, completion_PGT = batch()
    prefix = model.prefill(params, prompt_PS, mask_PS)
    hidden_PGTD = run_jit(model, params, *batch())[1]
    if unstacked:
        params, prefix = model.unstack(params, prefix)
    decoded = decode(model, params, prefix, completion_PGT, first_column=first_column, capacity=capacity)
    np.testing.assert_allclose(decoded, hidden_PGTD, **ROUNDING)


def test_several_tokens_after_a_cache() -> None:
    """Forced tokens enter at once: three from the cache, two in one call."""
    model, params = Decoder(CONFIG), loud_params()
    prompt_PS, mask_PS, completion_PGT = batch()
    prefix = model.prefill(params, prompt_PS, mask_PS)
    hidden_PGTD = run_jit(model, params, *batch())[1]
    _, kv = model.extend(params, completion_PGT[:, :, :3], prefix)
    cache = Cache(kv=kv, mask_RCT=jnp.ones((P, G, 3), bool), length_RC=jnp.full((P, G), 3))
    tail, _ = model.extend(params, completion_PGT[:, :, 3:], prefix, cache)
    np.testing.assert_allclose(tail, hidden_PGTD[:, :, 3:], **ROUNDING)


def test_append_writes_one_column() -> None:
    model = Decoder(CONFIG)
    kv = model.init_cache(loud_params(), 2, 3, 4)
    assert kv.k.shape == (2, 2, 4, 3, 4, 6)  # layers, rows, key-value heads, slots, columns, head width
    new = jax.tree.map(lambda x: jnp.ones_like(x[..., :1, :]), kv)
    written = model.append(kv, new, jnp.int32(2))
    for x in written:
        np.testing.assert_array_equal(x.sum(axis=(0, 1, 2, 3, 5)), [0, 0, 2 * 2 * 3 * 4 * 6, 0])


def test_nothing_to_attend_to_is_finite() -> None:
    """A prompt of padding only, and completions of no token."""
    model, params = Decoder(CONFIG), loud_params()
    prompt_PS, mask_PS, completion_PGT = batch()
    inputs = prompt_PS, mask_PS.at[1].set(False), completion_PGT
    value, grads = jax.jit(jax.value_and_grad(lambda p: scalar(run(model, p, *inputs))))(params)
    assert np.isfinite(value)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))
    prefix = model.prefill(params, *inputs[:2])
    assert model.extend(params, completion_PGT[:, :, :0], prefix)[0].shape == (P, G, 0, CONFIG.width)


@pytest.mark.parametrize("remat", ["dots", pytest.param("full", marks=pytest.mark.slow)])
def test_remat_of_two_layers_together(remat: str) -> None:
    params = loud_params()
    config = dataclasses.replace(CONFIG, remat=remat, remat_every=2)

    def gradient(config: DecoderConfig) -> Params:
        return jax.jit(jax.grad(lambda p: scalar(run(Decoder(config), p, *batch()))))(params)

    grads, expected = gradient(config), gradient(CONFIG)
    assert_trees_close(grads, expected, rtol=1e-4, atol=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["dots", "full"])
def test_remat_recomputes_and_changes_nothing(remat: str) -> None:
    params = loud_params()

    def grad(remat: str) -> Any:
        model = Decoder(dataclasses.replace(CONFIG, remat=remat))
        return jax.grad(lambda p: scalar(run(model, p, *batch())))

    assert_trees_close(jax.jit(grad(remat))(params), jax.jit(grad("none"))(params), rtol=1e-4, atol=5e-4)

    def count(primitive: str, remat: str) -> int:
        return str(jax.make_jaxpr(grad(remat))(params)).count(primitive)

    # What was not kept is computed once more: activation functions in both, matrix products and attention weights
    # in "full" only.
    assert count(" logistic ", remat) > count(" logistic ", "none")
    assert count(" exp ", "full") > count(" exp ", "dots") == count(" exp ", "none")
    assert count("dot_general[", "full") > count("dot_general[", "dots") == count("dot_general[", "none")


def values_and_grads(params: Params, *inputs: Array) -> Any:
    hiddens, pull = jax.vjp(lambda p: run(Decoder(CONFIG), p, *inputs), params)
    return hiddens, pull(jax.tree.map(jnp.cos, hiddens))[0]


@functools.cache
def one_device() -> Any:
    return jax.jit(values_and_grads)(loud_params(), *batch())


@pytest.mark.parametrize(
    "mesh_config",
    [
        MeshConfig(data=2, fsdp=2, group=1, tensor=2),
        MeshConfig(data=1, fsdp=2, group=2, tensor=2),
    ],
    ids=lambda m: f"data{m.data}-fsdp{m.fsdp}-group{m.group}-tensor{m.tensor}",
)
def test_eight_devices_equal_one(mesh_config: MeshConfig) -> None:
    expected_hiddens, expected_grads = one_device()
    mesh = make_mesh(mesh_config)
    with jax.set_mesh(mesh):
        # The declaration itself must not mind a mesh.
        placed = place_params(loud_params(), logical_axes(CONFIG), mesh)
        hiddens, grads = jax.jit(values_and_grads)(placed, *batch())
    assert_trees_close(hiddens, expected_hiddens, **ROUNDING)
    assert_trees_close(grads, expected_grads, rtol=1e-4, atol=5e-4)
    expected = jax.sharding.NamedSharding(mesh, partition_spec(("prompts", "group")))
    assert hiddens[1].sharding.is_equivalent_to(expected, 4)


def test_bfloat16_is_near_float32() -> None:
    params = init_params(CONFIG, jax.random.key(0))
    model = Decoder(dataclasses.replace(CONFIG, compute_dtype="bfloat16"))
    for x, y in zip(run_jit(model, params, *batch()), run_jit(Decoder(CONFIG), params, *batch()), strict=True):
        assert x.dtype == jnp.bfloat16
        # 8 bits of mantissa round by up to 2**-9 of a value; some ten roundings of values of size 1 to 3, and
        # the final norm brings a new model's small states to size 1.
        assert np.abs(x.astype(jnp.float32) - y).max() < 10 * 3 * 2**-9
        assert np.abs(x.astype(jnp.float32) - y).max() > 2**-9  # it is another precision
    assert model.head(params).dtype == jnp.bfloat16
    prefix = model.prefill(params, *batch()[:2])
    assert {x.dtype for x in jax.tree.leaves(prefix.kv)} == {jnp.dtype("bfloat16")}
    grads = jax.jit(jax.grad(lambda p: scalar(run(model, p, *batch()))))(params)
    assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_logical_axes_fit_the_parameters(tie: bool, bias: bool) -> None:
    config = dataclasses.replace(CONFIG, tie_embeddings=tie, qkv_bias=bias)
    params, axes = init_params(config, jax.random.key(0)), logical_axes(config)
    sizes = {"layers": 2, "embed": 32, "mlp": 48, "kv_heads": 4, "vocab": 40}
    names = jax.tree.map(lambda x: x, axes, is_leaf=lambda x: isinstance(x, tuple))
    assert jax.tree.structure(params) == jax.tree.structure(names, is_leaf=lambda x: isinstance(x, tuple))
    for x, axis_names in zip(
        jax.tree.leaves(params), jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple)), strict=True
    ):
        assert x.dtype == jnp.float32
        assert len(axis_names) == x.ndim
        assert all(sizes[name] == size for name, size in zip(axis_names, x.shape, strict=True) if name)
    assert ("head" in params) == (not tie)
    assert ("qkv_bias" in params["layers"]) == bias
    head = Decoder(config).head(params)
    np.testing.assert_array_equal(head, params["embed" if tie else "head"])


def test_new_parameters() -> None:
    """Normal weights of the documented sizes, each layer with its own, repeatable from the key."""
    config = dataclasses.replace(CONFIG, width=64, ffn_width=256, vocab_size=500)
    params = init_params(config, jax.random.key(5))
    layers = params["layers"]
    # At least 8,000 samples: the standard deviation is within 5 of its standard errors, 0.8 % each.
    for x, std in (
        (params["embed"], 0.02),
        (layers["qkv"], 0.02),
        (layers["down"], 0.01),
        (layers["gate"], 0.02),
        (layers["up"], 0.02),
    ):
        np.testing.assert_allclose(np.std(x), std, rtol=0.04)
    np.testing.assert_array_equal(layers["attn_norm"], 1)
    np.testing.assert_array_equal(layers["qkv_bias"], 0)
    assert np.abs(layers["qkv"][0] - layers["qkv"][1]).max() > 0.01
    assert_trees_close(init_params(config, jax.random.key(5)), params, rtol=0, atol=0)
    assert np.abs(init_params(config, jax.random.key(6))["embed"] - params["embed"]).max() > 0.01


def test_plain_rope_frequencies() -> None:
    # theta ** (-2i / head_width): 100 ** 0, 100 ** (-1/3), 100 ** (-2/3)
    np.testing.assert_allclose(rope_frequencies(CONFIG), [1, 0.2154435, 0.0464159], rtol=1e-6)


def test_llama3_rope_frequencies() -> None:
    scaling = RopeScaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position=100)
    config = dataclasses.replace(CONFIG, rope_scaling=scaling)
    # Wavelengths 6.28, 29.2 and 135 against the limits 25 and 100: kept; blended with weight
    # (100 / 29.1639 - 1) / 3 = 0.809632, so 0.2154435 * (0.190368 / 8 + 0.809632) = 0.179556; divided by 8.
    np.testing.assert_allclose(rope_frequencies(config), [1, 0.179556, 0.0464159 / 8], rtol=1e-5)


def test_shape_of_a_new_model() -> None:
    config = DecoderConfig.from_model_config(ModelConfig(remat="dots", compute_dtype="bfloat16"), vocab_size=30)
    assert (config.vocab_size, config.head_width, config.remat, config.compute_dtype) == (
        30,
        32,
        "dots",
        "bfloat16",
    )
    assert Decoder(config).vocab_size == 30
    assert hash(Decoder(config)) == hash(Decoder(dataclasses.replace(config)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 6}, r"num_heads \(6\) must be a positive multiple of num_kv_heads \(4\)"),
        ({"head_width": 5}, "head_width must be even .* got 5"),
        ({"compute_dtype": "float16"}, "compute_dtype must be one of float32, bfloat16, got 'float16'"),
        ({"remat": "some"}, "remat must be one of none, dots, full, got 'some'"),
        ({"remat": "full", "remat_every": 3}, r"model.remat_every \(3\) must divide the number of layers \(2\)"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)
