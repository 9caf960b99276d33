"""What the machine can do: matrix products and memory traffic, the best of several attempts.

    python -m experiments.bench.ceilings [--json FILE]

Compiled by XLA like everything that is measured against them: products of square matrices of two sizes, a pass
over a large array that reads and writes it in place, and a triad (``a + s b``) that reads another as well. In
place, because a new array of this size costs a CPU's operating system more than the traffic does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from experiments.bench.measure import repeat_seconds, write_json


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """One device's."""

    float32: float
    """FLOP/s of matrix products."""
    bfloat16: float
    """FLOP/s of matrix products, accumulated in float32."""
    bandwidth: float
    """Bytes/s, read and written together."""

    def flops(self, compute_dtype: str) -> float:
        """FLOP/s in a compute dtype."""
        return {"float32": self.float32, "bfloat16": self.bfloat16}[compute_dtype]

    def describe(self) -> str:
        """One line."""
        return (
            f"ceilings of a device: float32 {self.float32 / 1e9:.0f} GFLOP/s, bfloat16 "
            f"{self.bfloat16 / 1e9:.0f} GFLOP/s, memory {self.bandwidth / 1e9:.1f} GB/s"
        )


def best_of(measured: list[Ceilings]) -> Ceilings:
    """The highest of each: whatever else the machine was doing can only lower them."""
    return Ceilings(**{name: max(getattr(c, name) for c in measured) for name in asdict(measured[0])})


def disturbance(measured: list[Ceilings]) -> float:
    """How far the lowest float32 ceiling lies below the highest, as a share of it."""
    return 1 - min(c.float32 for c in measured) / max(c.float32 for c in measured)


def measure_ceilings(*, attempts: int = 5) -> Ceilings:
    """Measure the default device."""
    is_cpu = jax.default_backend() == "cpu"
    sizes = (1024, 2048) if is_cpu else (4096, 8192)
    # Far more than any cache holds.
    elements = 2**27 if is_cpu else 2**29
    a = jnp.ones(elements, jnp.float32)
    traffic = {
        _best_in_place(lambda x: -x, (), elements, attempts): 2,
        _best_in_place(lambda x, a: x + 3.0 * a, (a,), elements, attempts): 3,
    }
    return Ceilings(
        float32=max(_products(size, "float32", attempts) for size in sizes),
        bfloat16=max(_products(size, "bfloat16", attempts) for size in sizes),
        bandwidth=max(arrays * a.nbytes / seconds for seconds, arrays in traffic.items()),
    )


def _products(size: int, dtype: str, attempts: int) -> float:
    x = jax.random.normal(jax.random.key(0), (size, size)).astype(dtype)

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.matmul(x, y, preferred_element_type=jnp.float32)

    return 2 * size**3 / _best(product, (x, x.T), attempts)


def _best(function: Callable[..., Any], arguments: tuple[jax.Array, ...], attempts: int) -> float:
    compiled = jax.jit(function)
    return min(repeat_seconds(lambda: compiled(*arguments), attempts))


def _best_in_place(
    function: Callable[..., jax.Array], others: tuple[jax.Array, ...], elements: int, attempts: int
) -> float:
    compiled = jax.jit(function, donate_argnums=0)
    held = [jnp.ones(elements, jnp.float32)]

    def call() -> jax.Array:
        held[0] = compiled(held[0], *others)
        return held[0]

    return min(repeat_seconds(call, attempts))


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure matrix products and memory traffic of the default device."""

    attempts: int = 5
    """The best of so many counts."""
    json: Path | None = None
    """Write the numbers to this file as well."""


if __name__ == "__main__":
    options = tyro.cli(Options)
    ceilings = measure_ceilings(attempts=options.attempts)
    print(ceilings.describe())
    write_json(options.json, asdict(ceilings))
