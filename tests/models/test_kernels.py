"""The kernels of accelerators against the plain attention: values, gradients, and when which is taken."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.config import MeshConfig, ModelConfig
from grpo_jax.mesh import make_mesh
from grpo_jax.models import attention, kernels
from grpo_jax.models.attention import attend
from grpo_jax.models.config import DecoderConfig
from grpo_jax.models.decoder import Decoder, init_params
from grpo_jax.models.kv import KV, Context
from grpo_jax.models.splash import splash
from grpo_jax.types import Array

KERNELS = {
    "cudnn": functools.partial(kernels.cudnn, implementation="xla"),
    "splash": functools.partial(splash, interpret=True),
}
P, K, G, Q, H = 2, 2, 2, 3, 8
SMALL = (11, 7)
# Splash has two blocks of queries and three of keys, and the prompt ends within one.
SEVERAL_BLOCKS = (130, 131)


def inputs(lengths: tuple[int, int], dtype: Any, sizes: tuple[int, ...] = (P, K, G, Q, H)) -> tuple[Array, KV, KV]:
    """Queries, own and prompt's keys and values."""
    (T, S), (P, K, G, Q, H) = lengths, sizes
    shapes = ((P, K, G, T, Q, H), *((P, K, G, T, H),) * 2, *((P, K, S, H),) * 2)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    q, own_k, own_v, k, v = (
        jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)
    )
    return q, KV(own_k, own_v), KV(k, v)


def padding(num_prompts: int, length: int) -> Array:
    """None before the first prompt, and a third more before each of the following."""
    return jnp.arange(length)[None] >= jnp.arange(num_prompts)[:, None] * length // 3


def documents(length: int) -> Array:
    """Rows of one to five completions, other ones in each; the first may be of one token."""
    begins_PGT = jax.random.bernoulli(jax.random.key(1), 3 / length, (P, G, length)).at[0, 0].set(False)
    return jnp.cumsum(begins_PGT.at[1, 1, 1].set(True), axis=2)


def values_and_grads(function: Any, document_PGT: Array | None, arrays: tuple[Array, KV, KV]) -> list[Array]:
    """Attended values, and the gradients of queries, keys and values for some gradient of them."""

    def attended(q_PKGTQH: Array, own: KV, prompt: KV) -> Array:
        mask_PS = padding(prompt.k.shape[0], prompt.k.shape[2])
        return function(q_PKGTQH, own, document_PGT, (Context(prompt, mask_PS),))

    out, pull = jax.vjp(attended, *arrays)
    d_out = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape).astype(out.dtype)
    return jax.tree.leaves((out, pull(d_out)))


def assert_all_close(actual: list[Array], expected: list[Array], tolerance: float) -> None:
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        # Prompts' gradients are sums over a group.
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(1, np.abs(y).max()))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("lengths", [SMALL, SEVERAL_BLOCKS], ids=str)
def test_equals_the_plain_attention(name: str, lengths: tuple[int, int], packed: bool) -> None:
    if name == "splash" and (lengths == SMALL) == packed:
        pytest.skip("interpreting it is slow")
    document_PGT = documents(lengths[0]) if packed else None
    arrays = inputs(lengths, jnp.float32)
    run = jax.jit(values_and_grads, static_argnums=0)
    assert_all_close(run(KERNELS[name], document_PGT, arrays), run(attend, document_PGT, arrays), 1e-5)


@pytest.mark.parametrize("name", KERNELS)
def test_bfloat16_is_as_near_to_the_truth(name: str) -> None:
    arrays, document_PGT = inputs(SMALL, jnp.bfloat16), documents(SMALL[0])
    truth = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    run = jax.jit(values_and_grads, static_argnums=0)
    exact = run(attend, document_PGT, truth)
    for function in (KERNELS[name], attend):
        got = run(function, document_PGT, arrays)
        assert {x.dtype for x in got} == {jnp.dtype("bfloat16")}
        # A rounding of weights or scores, 2**-9 of values up to 4, is averaged over the keys; that of the result
        # adds 2**-9 of it.
        assert_all_close([x.astype(jnp.float32) for x in got], exact, 4 * 2**-9)


def test_eight_devices_equal_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device runs the kernel on its own prompts, heads and completions."""
    arrays = inputs(SMALL, jnp.float32)
    run = jax.jit(values_and_grads, static_argnums=0)
    expected = run(attend, None, arrays)
    monkeypatch.setattr(attention, "accelerated", lambda *_: KERNELS["cudnn"])
    with jax.set_mesh(make_mesh(MeshConfig(data=2, group=2, tensor=2))):
        assert_all_close(run(functools.partial(attend, kernel="cudnn"), None, arrays), expected, 1e-5)


# ---- which is taken


def queries(num_tokens: int = 4, width: int = 64, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct((P, K, G, num_tokens, Q, width), dtype)


def contexts(*ranks: int) -> tuple[Context, ...]:
    return tuple(Context(KV(jnp.zeros(()), jnp.zeros(())), jnp.ones((1,) * rank, bool)) for rank in ranks)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make JAX say that it runs elsewhere."""

    def machine(backend: str, **device: str) -> None:
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(**device)])

    return machine


def test_auto_takes_the_kernel_of_the_device(pretend: Any) -> None:
    def auto(**kinds: Any) -> Any:
        return kernels.accelerated("auto", queries(**kinds), contexts(2))

    assert auto() is None
    pretend("gpu", compute_capability="8.6")
    assert auto() is kernels.cudnn
    assert auto(width=128) is kernels.cudnn
    assert auto(dtype=jnp.float32) is auto(width=60) is auto(width=256) is None
    pretend("gpu", compute_capability="9.0")
    assert auto(width=256) is kernels.cudnn
    assert auto(width=264) is None
    for other in ({"compute_capability": "7.5"}, {"compute_capability": "gfx90a"}, {}):
        pretend("gpu", **other)
        assert auto() is None
    pretend("tpu")
    assert auto() is auto(dtype=jnp.float32) is auto(width=256, num_tokens=2**15) is splash
    assert auto(width=96) is auto(num_tokens=2**15 + 1) is None


@pytest.mark.parametrize("choice", ["auto", "cudnn"])
def test_only_whole_completions_take_a_kernel(choice: str, pretend: Any) -> None:
    pretend("gpu", compute_capability="9.0")
    assert kernels.accelerated(choice, queries(), contexts(2)) is kernels.cudnn
    assert kernels.accelerated("plain", queries(), contexts(2)) is None
    # A prompt, a turn after a cache, one token, none.
    for ranks, num_tokens in (((), 4), ((2, 3), 4), ((2,), 1), ((2,), 0)):
        assert kernels.accelerated(choice, queries(num_tokens), contexts(*ranks)) is None


@pytest.mark.parametrize(
    ("choice", "machine", "kinds", "message"),
    [
        ("cudnn", ("cpu", {}), {}, "model.attention='cudnn' needs an NVIDIA GPU, got the backend 'cpu'; use "),
        ("cudnn", ("gpu", {"compute_capability": "7.0"}), {}, "of compute capability 8.0 or later, got 7.0"),
        (
            "cudnn",
            ("gpu", {"compute_capability": "8.0"}),
            {"dtype": jnp.float32},
            "model.compute_dtype='bfloat16', got 'float32'",
        ),
        ("cudnn", ("gpu", {"compute_capability": "8.0"}), {"width": 256}, "at most 128, got 256"),
        (
            "splash",
            ("gpu", {"compute_capability": "8.0"}),
            {},
            "model.attention='splash' needs a TPU, got the bac",
        ),
        ("splash", ("tpu", {}), {"width": 96}, "multiple of 64, got 96; use model.attention='auto' or 'plain'"),
        ("splash", ("tpu", {}), {"num_tokens": 2**16}, "at most 32768 tokens, got 65536"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused(
    choice: str, machine: Any, kinds: Any, message: str, pretend: Any
) -> None:
    pretend(machine[0], **machine[1])
    with pytest.raises(ValueError, match=message):
        kernels.accelerated(choice, queries(**kinds), contexts(2))


def test_the_choice_travels_and_is_checked() -> None:
    model = ModelConfig(attention="cudnn", compute_dtype="bfloat16")
    assert DecoderConfig.from_model_config(model, vocab_size=30).attention == "cudnn"
    with pytest.raises(ValueError, match="attention must be one of auto, plain, cudnn, splash, got 'fast'"):
        dataclasses.replace(DecoderConfig.from_model_config(model, vocab_size=30), attention="fast")
    with pytest.raises(ValueError, match="model.attention='cudnn' .* got model.compute_dtype='float32'"):
        ModelConfig(attention="cudnn")


# ---- the kernels as they are compiled for their devices


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels can be traced and lowered without their devices."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91_000)
    monkeypatch.setattr(kernels, "_without_cudnn", lambda _: None)
    monkeypatch.setattr(kernels, "_without_splash", lambda _: None)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("function", "platform", "calls"),
    [
        (kernels.cudnn, "cuda", ["@__cudnn$fmhaScaleBiasSoftmax(", "@__cudnn$fmhaScaleBiasSoftmaxBackward("]),
        (splash, "tpu", ["splash_mha_fwd_segmented", "splash_mha_dq_segmented", "splash_mha_dkv_segmented"]),
    ],
    ids=["cudnn", "splash"],
)
@pytest.mark.parametrize("width", [64, 128])
def test_lowers_for_its_device(
    function: Any, platform: str, calls: list[str], width: int, packed: bool, anywhere: None
) -> None:
    """The device's own checks of shapes, dtypes and layouts, as far as they come before its compiler."""
    arrays = inputs((201, 131), jnp.bfloat16, (P, K, G, 4, width))
    run = jax.jit(functools.partial(values_and_grads, function, documents(201) if packed else None))
    text = run.trace(arrays).lower(lowering_platforms=(platform,)).as_text()
    for call in calls:
        assert text.count(call) == 1, call
    if platform == "cuda":
        # One mask for all rows, where no row has one of its own.
        assert f"tensor<{P * G if packed else 1}x1x208x344xbf16>" in text


@pytest.mark.parametrize(
    ("choice", "forward", "backward"),
    [
        ("cudnn", "dot_product_attention_fwd_wrapper[", "dot_product_attention_bwd_wrapper["),
        ("splash", "name=splash_mha_fwd", "name=splash_mha_dq"),
    ],
)
def test_dots_keeps_what_a_kernel_returned(choice: str, forward: str, backward: str, anywhere: None) -> None:
    if choice == "splash" and jax.__version_info__ < (0, 12):
        pytest.skip("JAX 0.10 computes splash's results again")
    model = ModelConfig(
        num_layers=2, width=64, num_heads=1, num_kv_heads=1, attention=choice, compute_dtype="bfloat16"
    )

    def count(remat: str) -> tuple[int, int]:
        config = dataclasses.replace(DecoderConfig.from_model_config(model, vocab_size=30), remat=remat)
        decoder, params = Decoder(config), init_params(config, jax.random.key(0))
        tokens_PGT = jnp.zeros((P, G, 5), jnp.int32)

        def scalar(params: Any) -> Array:
            prefix = decoder.prefill(params, tokens_PGT[:, 0], tokens_PGT[:, 0] == 0)
            return decoder.extend(params, tokens_PGT, prefix)[0].astype(jnp.float32).sum()

        text = str(jax.make_jaxpr(jax.grad(scalar))(params))
        return text.count(forward), text.count(backward)

    assert count("none") == count("dots") == (1, 1)
    assert count("full") == (2, 1)
