"""Attention by the kernels of accelerators, in the place of the plain computation of grpo_jax/models/attention.py.

Shapes as there: P prompts, G completions of a prompt, T tokens, S keys of the prompt, K key-value heads, Q query
heads of one key-value head, H head width. For a kernel, B = P * G rows and N = K * Q query heads.

Both kernels take one softmax over one row of keys, so each completion gets a copy of its prompt's. Keeping one
copy would mean two calls whose results are merged by their log-normalisers: neither kernel lets gradients through
those, and ``jax.nn.dot_product_attention`` rounds them to the dtype of the queries.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp

from grpo_jax.models.config import DecoderConfig
from grpo_jax.models.kv import KV, Context, padded, round_up
from grpo_jax.types import Array


class Kernel(Protocol):
    """Attention on one device, of arguments as :func:`grpo_jax.models.attention.attend` takes them."""

    def __call__(
        self, q_PKGTQH: Array, own: KV, document_PGT: Array | None, context: tuple[Context, ...], /
    ) -> Array:
        """Attended values."""


def accelerated(choice: str, q_PKGTQH: Array, context: tuple[Context, ...]) -> Kernel | None:
    """The kernel for these queries, or None for the plain computation.

    Kernels take whole completions with their prompt. Everything else, such as decoding and the prompts themselves,
    is plain, whatever the choice.

    Args:
        choice: "plain", "cudnn", "splash", or "auto" for the one that runs on the default device, if any.
        q_PKGTQH: queries, of which only the shape and the dtype count.
        context: of the queries, likewise.

    Raises:
        ValueError: the kernel that ``choice`` names cannot run here.
    """
    whole = q_PKGTQH.shape[3] > 1 and q_PKGTQH.size > 0
    if choice == "plain" or not whole or [mask.ndim for _, mask in context] != [2]:
        return None
    for name, obstacle in (("cudnn", _without_cudnn), ("splash", _without_splash)):
        if choice not in (name, "auto"):
            continue
        reason = obstacle(q_PKGTQH)
        if reason is None:
            return cudnn if name == "cudnn" else _splash_module().splash
        if choice == name:
            raise ValueError(f"model.attention={choice!r} {reason}; use model.attention='auto' or 'plain'")
    return None


def check_attention(config: DecoderConfig, max_completion_length: int) -> None:
    """Refuse a kernel that cannot run here, before anything is computed.

    Raises:
        ValueError: the kernel that ``config.attention`` names cannot run on these devices, or not on this model.
    """
    K, dtype = config.num_kv_heads, config.compute_dtype
    of: Any = jax.ShapeDtypeStruct
    # All tokens but a completion's last pass through the model.
    q_PKGTQH = of((1, K, 1, max_completion_length - 1, config.num_heads // K, config.head_width), dtype)
    k_PKSH = of((1, K, 1, config.head_width), dtype)
    accelerated(config.attention, q_PKGTQH, (Context(KV(k_PKSH, k_PKSH), of((1, 1), bool)),))


def _splash_module() -> Any:
    # Only where it is used: Pallas takes most of a second to import.
    from grpo_jax.models import splash

    return splash


def _without_cudnn(q_PKGTQH: Array) -> str | None:
    """What cuDNN would need for these queries, None if nothing."""
    if jax.default_backend() != "gpu":
        return f"needs an NVIDIA GPU, got the backend {jax.default_backend()!r}"
    # "8.0" and the like; GPUs of other makes have names, or nothing.
    capability = str(getattr(jax.local_devices()[0], "compute_capability", None))
    major = int(capability.split(".")[0]) if capability[0].isdigit() else 0
    if major < 8:
        return f"needs an NVIDIA GPU of compute capability 8.0 or later, got {capability}"
    if q_PKGTQH.dtype != jnp.bfloat16:
        return f"needs model.compute_dtype='bfloat16', got {q_PKGTQH.dtype.name!r}"
    # The backward pass takes wider heads on Hopper only.
    width, widest = q_PKGTQH.shape[-1], 256 if major == 9 else 128
    if width % 8 or width > widest:
        return f"needs heads whose width is a multiple of 8 and at most {widest}, got {width}"
    return None


def _without_splash(q_PKGTQH: Array) -> str | None:
    """What the splash kernel would need for these queries, None if nothing."""
    if jax.default_backend() != "tpu":
        return f"needs a TPU, got the backend {jax.default_backend()!r}"
    width = q_PKGTQH.shape[-1]
    if width % 64:
        return f"needs heads whose width is a multiple of 64, got {width}"
    length, longest = q_PKGTQH.shape[3], _splash_module().MAX_TOKENS
    if length > longest:
        return f"needs rows of at most {longest} tokens, got {length}"
    return None


def is_cudnn(primitive: Any, *_: Any, **__: Any) -> bool:
    """A rule of :func:`jax.checkpoint`: keep what cuDNN's forward pass returns, which bears no name."""
    return primitive.name.startswith("dot_product_attention_fwd")


def cudnn(
    q_PKGTQH: Array,
    own: KV,
    document_PGT: Array | None,
    context: tuple[Context, ...],
    /,
    *,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Array:
    """Flash attention of cuDNN, of completions to themselves and to their prompt, which is padded on the left.

    The completion's keys come first and the prompt's follow in reverse: padding is then at the end, where a length
    cuts it off, and unless a row holds several documents, all rows share one mask.
    """
    P, K, G, T, Q, H = q_PKGTQH.shape
    ((prompt, mask_PS),) = context
    # In training cuDNN takes a mask of even lengths only; multiples of 8 keep its rows aligned as well.
    rows, prompt_keys = round_up(T, 8), round_up(mask_PS.shape[1], 8)

    def joined(own_PKGTH: Array, prompt_PKSH: Array) -> Array:
        first = padded(jnp.einsum("pkgth->pgtkh", own_PKGTH), 2, rows)
        last = padded(jnp.flip(jnp.einsum("pksh->pskh", prompt_PKSH), axis=1), 1, prompt_keys)
        last = jnp.broadcast_to(last[:, None], (P, G, *last.shape[1:]))
        return jnp.concatenate([first, last], axis=2).reshape(P * G, rows + prompt_keys, K, H)

    q_BTNH = padded(jnp.einsum("pkgtqh->pgtkqh", q_PKGTQH).reshape(P * G, T, K * Q, H), 1, rows)
    mask_B1TT = jnp.tri(rows, dtype=bool)[None, None]
    if document_PGT is not None:
        document_BT = padded(document_PGT.reshape(P * G, T), 1, rows)
        mask_B1TT = mask_B1TT & (document_BT[:, None, :, None] == document_BT[:, None, None])
    mask_B1TS = jnp.pad(mask_B1TT, ((0, 0), (0, 0), (0, 0), (0, prompt_keys)), constant_values=True)
    attended_BTNH = jax.nn.dot_product_attention(
        q_BTNH,
        joined(own.k, prompt.k),
        joined(own.v, prompt.v),
        mask=mask_B1TS,
        key_value_seq_lengths=jnp.repeat(rows + mask_PS.sum(axis=1, dtype=jnp.int32), G),
        implementation=implementation,
    )
    return jnp.einsum("pgtkqh->pkgtqh", attended_BTNH[:, :T].reshape(P, G, T, K, Q, H))
