"""Products of activations with weights, whose gradients are written down rather than derived.

What JAX derives is right, but has the wide operand transposed in memory: for a feed-forward layer that copy costs
more than a product.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from grpo_jax.types import Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def project(x: Array, weights: Array, num_axes: int = 1) -> Array:
    """Contract the last ``num_axes`` axes of ``x`` with the first ones of ``weights``."""
    return jnp.tensordot(x, weights, num_axes)


def _project_forward(x: Array, weights: Array, num_axes: int) -> tuple[Array, tuple[Array, Array]]:
    return checkpoint_name(project(x, weights, num_axes), "product"), (x, weights)


def _project_backward(num_axes: int, kept: tuple[Array, Array], d_out: Array) -> tuple[Array, Array]:
    x, weights = kept
    outputs = weights.ndim - num_axes
    leading = tuple(range(x.ndim - num_axes))
    d_x = jnp.tensordot(d_out, weights, (tuple(range(-outputs, 0)), tuple(range(num_axes, weights.ndim))))
    # The input comes first: it is the operand that is transposed.
    return d_x, jnp.tensordot(x, d_out, (leading, leading))


project.defvjp(_project_forward, _project_backward)


@jax.custom_vjp
def swiglu(gate: Array, up: Array) -> Array:
    """``silu(gate) * up`` (arXiv 2002.05202), elementwise; only the inputs are kept for the gradient."""
    return jax.nn.silu(gate) * up


def _swiglu_forward(gate: Array, up: Array) -> tuple[Array, tuple[Array, Array]]:
    return swiglu(gate, up), (gate, up)


def _swiglu_backward(kept: tuple[Array, Array], d_out: Array) -> tuple[Array, Array]:
    gate, up = kept
    sigmoid = jax.nn.sigmoid(gate)
    d_gate = d_out * up * sigmoid * (1 + gate * (1 - sigmoid))
    return d_gate, d_out * gate * sigmoid


swiglu.defvjp(_swiglu_forward, _swiglu_backward)
