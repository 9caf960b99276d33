"""The worked numbers of ``golden/objectives.json``, all of them, eager and compiled, and the reference beside."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.algorithms.advantages import group_advantages
from grpo_jax.algorithms.aggregates import masked_mean
from grpo_jax.algorithms.kl import kl_penalty
from grpo_jax.algorithms.lengths import soft_overlong
from grpo_jax.algorithms.logprobs import token_logps
from grpo_jax.algorithms.objectives import grpo_loss, policy_loss
from tests.algorithms import reference
from tests.algorithms.batches import GOLDEN, golden_batch

# The file's numbers are exact to float64; what remains is another order of sums.
EXACT = {"rtol": 0.0, "atol": 1e-12}


class Row(NamedTuple):
    """One number (or array) of the file, and two functions of the same inputs that should give it."""

    name: str
    expected: Any
    inputs: tuple[Any, ...]
    package: Callable[..., Any]
    independent: Callable[..., Any]


def loss_row(index: int, row: dict[str, Any]) -> Row:
    batch = golden_batch(advantages_name=row.get("advantages", "group (eps 1e-4, ddof 1)"))
    # Whatever else a row says is a keyword, so that none can be overlooked.
    options = {key: value for key, value in row.items() if key not in ("loss", "advantages")}
    options["max_completion_length"] = GOLDEN["inputs"]["max_completion_length"]

    def package(new: Any, old: Any, A: Any, mask: Any, ref: Any, *, kl: str = "k3", **options: Any) -> Any:
        return grpo_loss(new, A, mask, old_logps_PGT=old, ref_logps_PGT=ref, kl_estimator=kl, **options)[0]

    def independent(new: Any, old: Any, A: Any, mask: Any, ref: Any, **options: Any) -> Any:
        return reference.loss(new, old, A, mask, ref_PGT=ref, **options)

    inputs = (batch.new, batch.old, batch.advantages_PG, batch.mask, batch.ref)
    name = "-".join(str(value) for key, value in row.items() if key != "loss")
    return Row(
        f"losses-{index}-{name}",
        row["loss"],
        inputs,
        functools.partial(package, **options),
        functools.partial(independent, **options),
    )


def advantage_row(section: str, rewards: Any, name: str, expected: Any) -> Row:
    parsed = re.fullmatch(r"(\w+)(?: \(eps (\S+), ddof (\d)\))?", name)
    assert parsed, name
    options: dict[str, Any] = {"estimator": parsed[1]}
    if parsed[2]:
        options |= {"eps": float(parsed[2]), "ddof": int(parsed[3])}
    return Row(
        f"{section}-{name}",
        expected,
        (np.array([[math.nan if r is None else r for r in row] for row in rewards]),),
        functools.partial(group_advantages, **options),
        functools.partial(reference.advantages, **options),
    )


def kl_row(estimator: str, expected: float) -> Row:
    batch = golden_batch()

    def package(new: Any, ref: Any, mask: Any) -> Any:
        return masked_mean(kl_penalty(new, ref, estimator=estimator), mask)

    def independent(new: Any, ref: Any, mask: Any) -> Any:
        return np.mean([reference.KL[estimator](n, r, n) for n, r in zip(new[mask], ref[mask], strict=True)])

    return Row(f"kl_token_mean-{estimator}", expected, (batch.new, batch.ref, batch.mask), package, independent)


def clip_fraction_row(side: str, expected: float) -> Row:
    batch = golden_batch()

    def package(new: Any, old: Any, A: Any, mask: Any) -> Any:
        _, metrics = policy_loss(new, old, A, mask)
        low, high = metrics["clip_low_fraction"], metrics["clip_high_fraction"]
        return {"low": low, "high": high, "any": low + high}[side]

    def independent(new: Any, old: Any, A: Any, mask: Any) -> Any:
        """Tokens with an advantage whose loss stands still when their log-probability moves."""
        here, there = (reference.token_losses(x, old, A, mask) for x in (new, new + 1e-9))
        of_side = {"low": A < 0, "high": A > 0, "any": A != 0}[side][..., None]
        return (mask & of_side & (here == there)).sum() / mask.sum()

    inputs = (batch.new, batch.old, batch.advantages_PG, batch.mask)
    return Row(f"clip_fraction_token_mean-{side}", expected, inputs, package, independent)


def single_token_row(row: dict[str, float]) -> Row:
    options = {"clip_low": row["clip"], "clip_high": row["clip"]}
    options |= {key: value for key, value in row.items() if key not in ("A", "rho", "clip", "loss")}
    one = np.ones((1, 1, 1))
    return Row(
        "single_token-" + "-".join(f"{key}={value}" for key, value in row.items()),
        row["loss"],
        (math.log(row["rho"]) * one, 0 * one, row["A"] * one[0], one.astype(bool)),
        lambda *inputs: policy_loss(*inputs, **options)[0],
        functools.partial(reference.loss, **options),
    )


def temperature_row(row: dict[str, Any]) -> Row:
    size = len(row["logits"])
    options = {"temperature": row["temperature"], "vocab_size": size}
    return Row(
        f"temperature-{row['temperature']}",
        row["logps"],
        (np.ones((size, 1)), np.array(row["logits"])[:, None], np.arange(size)),
        lambda *inputs: token_logps(*inputs, chunk_size=2, **options)[0],
        lambda *inputs: reference.token_logps(*inputs, **options)[0],
    )


def soft_overlong_row(length: int, expected: float) -> Row:
    options = {"max_length": GOLDEN["soft_overlong"]["Lmax"], "cache": GOLDEN["soft_overlong"]["cache"]}
    return Row(
        f"soft_overlong-{length}",
        expected,
        (np.array(length),),
        functools.partial(soft_overlong, **options),
        functools.partial(reference.soft_overlong, **options),
    )


def advantage_rows(section: str, rewards: Any) -> list[Row]:
    items = GOLDEN[section].items()
    return [advantage_row(section, rewards, *item) for item in items if item[0] != "rewards_PG"]


SECTIONS: dict[str, list[Row]] = {
    "advantages": advantage_rows("advantages", GOLDEN["inputs"]["rewards_PG"]),
    "losses": [loss_row(*item) for item in enumerate(GOLDEN["losses"])],
    "advantages_1000": advantage_rows("advantages_1000", GOLDEN["advantages_1000"]["rewards_PG"]),
    "advantages_missing": advantage_rows("advantages_missing", GOLDEN["advantages_missing"]["rewards_PG"]),
    "kl_token_mean": [kl_row(*item) for item in GOLDEN["kl_token_mean"].items()],
    "clip_fraction_token_mean": [clip_fraction_row(*item) for item in GOLDEN["clip_fraction_token_mean"].items()],
    "single_token": [single_token_row(row) for row in GOLDEN["single_token"]],
    "temperature": [temperature_row(row) for row in GOLDEN["temperature"]],
    "soft_overlong": [soft_overlong_row(*case) for case in GOLDEN["soft_overlong"]["cases"]],
}
ROWS = [row for rows in SECTIONS.values() for row in rows]
over_rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


@functools.cache
def compiled() -> dict[str, Any]:
    """Every row, in one program."""
    program = jax.jit(lambda inputs: [row.package(*x) for row, x in zip(ROWS, inputs, strict=True)])
    return dict(zip([row.name for row in ROWS], program([row.inputs for row in ROWS]), strict=True))


def test_no_row_is_left_out() -> None:
    """Numbers of rows counted in the file by hand."""
    assert set(SECTIONS) | {"inputs"} == set(GOLDEN)
    assert {name: len(rows) for name, rows in SECTIONS.items()} == {
        "advantages": 7,
        "losses": 31,
        "advantages_1000": 5,
        "advantages_missing": 1,
        "kl_token_mean": 3,
        "clip_fraction_token_mean": 3,
        "single_token": 5,
        "temperature": 2,
        "soft_overlong": 5,
    }
    assert len({row.name for row in ROWS}) == len(ROWS) == 62


@over_rows
def test_eager(x64, row) -> None:
    got = row.package(*map(jnp.asarray, row.inputs))
    assert got.dtype == jnp.float64
    np.testing.assert_allclose(got, row.expected, **EXACT)


@over_rows
def test_compiled(x64, row) -> None:
    np.testing.assert_allclose(compiled()[row.name], row.expected, **EXACT)


@over_rows
def test_reference(row) -> None:
    np.testing.assert_allclose(row.independent(*row.inputs), row.expected, **EXACT)
