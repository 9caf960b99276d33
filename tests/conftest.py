"""What every test runs under: eight CPU devices, no silent broadcasting of ranks, repeatable properties."""

from __future__ import annotations

import os

# All are read when JAX is first imported, so they come before it.
os.environ["JAX_PLATFORMS"] = "cpu"
# The suite compiles hundreds of small programs that each run once: unoptimized ones are ready in a third of
# the time.
for _flag in ("--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"):
    if _flag.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}".strip()

from collections.abc import Iterator

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")

# No deadline: the first example of a property compiles. A function-scoped fixture is allowed because
# the one that properties use (x64) is a context that holds for all examples of the test.
_COMMON = {
    "deadline": None,
    "max_examples": 25,
    "suppress_health_check": [hypothesis.HealthCheck.function_scoped_fixture],
}
hypothesis.settings.register_profile("local", **_COMMON)
hypothesis.settings.register_profile("ci", derandomize=True, print_blob=True, database=None, **_COMMON)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture
def x64() -> Iterator[None]:
    """Run one test with float64 enabled."""
    with jax.enable_x64(True):
        yield
