"""What refill gains where completions differ in length: tokens/s beside waiting for the longest of each batch.

    python -m experiments.bench.refill [--json refill.json]

The same slots decode the same completions twice: in one rollout whose slots take what is pending as they end, and
in rollouts of as many whole groups as there are slots for, one after the other. A random decoder is made to end
its completions at lengths from a lognormal distribution, looked up by a completion's first token: draws depend on
a token's place in the batch alone, so that both have the same lengths. Seconds are medians of calls in turn, after
a first one of each, prefill included. The bound is what counting steps alone promises.

Equal draws do not make equal tokens where rounding decides: a completion may differ from a token on whose draw
would be the other one with its uniform numbers shifted by 1e-5 (a near-tie).
"""

from __future__ import annotations

import heapq
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from experiments.bench.forced_lengths import EOS, ForcedLengths, forced_params, lognormal_lengths
from experiments.bench.measure import machine, with_changes, write_json
from experiments.bench.shapes import MODELS, ModelName, require_at_least
from grpo_jax.algorithms.logprobs import scaled_logits
from grpo_jax.mesh import slot_layout
from grpo_jax.models.decoder import Decoder
from grpo_jax.rollout.engine import generate
from grpo_jax.rollout.sampling import draw
from grpo_jax.rollout.state import EngineConfig
from grpo_jax.types import Params, Rollout

# What log-probabilities of two layouts may differ by, and hence what a tie may be apart.
TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare refill with waiting for the longest completion of each batch."""

    model: ModelName = "tiny"
    """A shape of experiments/bench/shapes.py."""
    prompts: int = 32
    """P."""
    group: int = 16
    """G."""
    prompt: int = 66
    """S, tokens of every prompt."""
    completion: int = 512
    """T: no completion is longer."""
    slots: int = 128
    """Completions decoded at a time: a multiple of the group."""
    median: float = 48.0
    """Of the completions' lengths."""
    sigma: float = 1.0
    """Standard deviation of the logarithm of the lengths."""
    repeats: int = 5
    """Timed calls of each."""
    seed: int = 0
    """Of weights, prompts, lengths and draws."""
    json: Path | None = None
    """Write all numbers to this file as well."""

    def __post_init__(self) -> None:
        require_at_least(1, self, "prompts", "group", "prompt", "slots", "repeats")
        require_at_least(2, self, "completion")
        if not (0 < self.median < math.inf and 0 <= self.sigma < math.inf):
            raise ValueError(
                f"median must be above 0 and sigma at least 0, both finite, got {self.median} and {self.sigma}"
            )
        if self.slots % self.group or self.prompts * self.group % self.slots:
            raise ValueError(
                f"slots must be a multiple of group ({self.group}) and divide prompts * group "
                f"({self.prompts * self.group}), got {self.slots}"
            )


class Comparison:
    """The two ways to decode a batch, compiled on first use."""

    def __init__(self, options: Options) -> None:
        self.options = options
        config = with_changes(MODELS[options.model], tie_embeddings=False)
        self.model = ForcedLengths(Decoder(config))
        rng = np.random.default_rng(options.seed)
        self.length_V = lognormal_lengths(
            config.vocab_size,
            median=options.median,
            sigma=options.sigma,
            cap=options.completion,
            seed=options.seed,
        )
        self.params: Params = forced_params(config, self.length_V, jax.random.key(options.seed))
        prompt_PS = rng.integers(1, config.vocab_size, (options.prompts, options.prompt), np.int32)
        self.prompt_PS = jnp.asarray(prompt_PS)
        self.mask_PS = jnp.ones(prompt_PS.shape, bool)
        self.key = jax.random.key(options.seed + 1)
        self._generate = jax.jit(generate, static_argnames=("model", "config"))

    def refilled(self) -> Rollout:
        """All prompts in one rollout."""
        return self._rollout(slice(None), self.options.slots)

    def waited(self) -> Rollout:
        """A slotful of whole groups after the other."""
        at_once = self.options.slots // self.options.group
        parts = [
            self._rollout(slice(start, start + at_once), None) for start in range(0, self.options.prompts, at_once)
        ]
        return jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)

    def _rollout(self, prompts: slice, num_slots: int | None) -> Rollout:
        config = EngineConfig(
            group_size=self.options.group,
            max_completion_length=self.options.completion,
            vocab_size=self.model.vocab_size,
            eos_ids=(EOS,),
            pad_id=EOS,
            num_slots=num_slots,
        )
        return self._generate(
            self.model,
            self.params,
            self.prompt_PS[prompts],
            self.mask_PS[prompts],
            self.key,
            None,
            config,
            jnp.arange(self.options.prompts)[prompts],
        )

    def is_near_tie(self, tokens_T: np.ndarray, other_T: np.ndarray, prompt: int, sample: int) -> bool:
        """Whether rounding may decide between two completions of a prompt where they first differ."""
        t = int(np.argmax(tokens_T != other_T))
        prefix = self.model.prefill(self.params, self.prompt_PS[prompt, None], self.mask_PS[prompt, None])
        hidden_1D = prefix.hidden_PD
        if t > 0:
            hidden_11TD, _ = self.model.extend(self.params, jnp.asarray(tokens_T[None, None, :t]), prefix)
            hidden_1D = hidden_11TD[0, 0, -1:]
        number = prompt * self.options.group + sample
        key = jax.random.fold_in(jax.random.fold_in(self.key, number), t)
        logits_1V = scaled_logits(
            hidden_1D, self.model.head(self.params), temperature=1.0, vocab_size=self.model.vocab_size
        )
        drawn = _draws_near(np.asarray(jax.random.uniform(key, (2,))), logits_1V)
        return {int(tokens_T[t]), int(other_T[t])} <= drawn


def _draws_near(uniforms_2: np.ndarray, logits_1V: jax.Array) -> set[int]:
    """All tokens that are drawn when either uniform number is shifted by the tolerance, or is not."""
    shifts = np.array([(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1)], np.float32) * TOLERANCE
    uniforms_N2 = np.clip(uniforms_2[None] + shifts, 0, 1 - 2**-23).astype(np.float32)
    tokens_N, _ = draw(jnp.asarray(uniforms_N2), jnp.repeat(logits_1V, len(shifts), axis=0))
    return set(np.asarray(tokens_N).tolist())


def waiting_steps(length_PG: np.ndarray, prompts_at_once: int) -> int:
    """Tokens decoded in each slot when every batch waits for its longest completion."""
    return sum(int(part.max()) for part in np.split(length_PG, len(length_PG) // prompts_at_once))


def refill_steps(length_PG: np.ndarray, num_rows: int, slots_per_row: int) -> int:
    """The same when slots take what is pending (grpo_jax/rollout/refill.py), on one shard."""
    row_free = [0] * num_rows
    for length_G in length_PG:
        start = heapq.heappop(row_free)
        slot_free = [start] * slots_per_row
        for length in length_G:
            heapq.heapreplace(slot_free, slot_free[0] + int(length))
        heapq.heappush(row_free, max(slot_free))
    return max(row_free)


def differences(a: Rollout, b: Rollout) -> tuple[list[tuple[int, int]], float]:
    """Completions whose tokens differ, and by how much log-probabilities do where tokens were equal so far."""
    tokens_a, tokens_b = np.asarray(a.completion_PGT), np.asarray(b.completion_PGT)
    mask = np.asarray(a.completion_mask_PGT & b.completion_mask_PGT)
    differs_PGT = (tokens_a != tokens_b) | (np.asarray(a.completion_mask_PGT) != np.asarray(b.completion_mask_PGT))
    common = mask & ~np.maximum.accumulate(differs_PGT, axis=-1)
    apart = np.abs(np.asarray(a.sampler_logps_PGT) - np.asarray(b.sampler_logps_PGT))
    return [(int(p), int(g)) for p, g in np.argwhere(differs_PGT.any(axis=-1))], float(apart[common].max())


def time_in_turn(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, one after the other, after a first round."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - start)
    return {name: values[1:] for name, values in seconds.items()}


def measure(options: Options) -> dict[str, Any]:
    """Times, schedules and differences."""
    comparison = Comparison(options)
    waited, refilled = comparison.waited(), comparison.refilled()
    length_PG = np.asarray(waited.completion_mask_PGT.sum(axis=-1))
    first_PG = np.asarray(waited.completion_PGT[:, :, 0])
    assert waited.finished_PG.all() and (length_PG == comparison.length_V[first_PG]).all(), "lengths not as forced"
    at_once = options.slots // options.group
    rows, slots = slot_layout(options.prompts, options.group, options.slots, 1)
    layouts = {"waiting": (at_once, options.group), "refill": (rows, slots)}
    steps = {"waiting": waiting_steps(length_PG, at_once), "refill": refill_steps(length_PG, rows, slots)}
    differing, logps_apart = differences(waited, refilled)
    tokens = [np.asarray(rollout.completion_PGT) for rollout in (waited, refilled)]
    ties = [comparison.is_near_tie(*(t[p, g] for t in tokens), p, g) for p, g in differing]
    seconds = time_in_turn({"waiting": comparison.waited, "refill": comparison.refilled}, options.repeats)
    num_tokens = int(length_PG.sum())
    result: dict[str, Any] = {
        name: {
            "rows": layouts[name][0],
            "slots_per_row": layouts[name][1],
            "steps": steps[name],
            "busy": num_tokens / (steps[name] * options.slots),
            "seconds": seconds[name],
            "median_seconds": statistics.median(seconds[name]),
            "tokens_per_second": num_tokens / statistics.median(seconds[name]),
        }
        for name in layouts
    }
    ratios = [a / b for a, b in zip(seconds["waiting"], seconds["refill"], strict=True)]
    return result | {
        "tokens": num_tokens,
        "lengths": np.percentile(length_PG, [0, 25, 50, 75, 100]).tolist(),
        "bound": steps["waiting"] / steps["refill"],
        "ratio": result["refill"]["tokens_per_second"] / result["waiting"]["tokens_per_second"],
        "ratios": [min(ratios), max(ratios)],
        "differing": len(differing),
        "differing_not_at_near_ties": len(differing) - sum(ties),
        "logps_apart": logps_apart,
    }


def show(result: dict[str, Any], options: Options) -> None:
    """One row for each way to decode, and what follows."""
    table = Table(title=", ".join(f"{key} {value}" for key, value in machine().items()), title_justify="left")
    for heading in ("", "rows x slots", "steps", "slots busy", "ms a step", "s", "tok/s"):
        table.add_column(heading, justify="right" if heading else "left")
    for name in ("waiting", "refill"):
        row = result[name]
        table.add_row(
            name,
            f"{row['rows']} x {row['slots_per_row']}",
            str(row["steps"]),
            f"{100 * row['busy']:.0f} %",
            f"{1e3 * row['median_seconds'] / row['steps']:.2f}",
            f"{row['median_seconds']:.3f}",
            f"{row['tokens_per_second']:.0f}",
        )
    Console(width=110, highlight=False).print(table)
    low, quarter, middle, three_quarters, high = result["lengths"]
    completions = options.prompts * options.group
    print(
        f"{completions} completions of {low:.0f} to {high:.0f} tokens (quartiles {quarter:.0f}, {middle:.0f}, "
        f"{three_quarters:.0f}), {result['tokens']} in all\n"
        f"refill: {result['ratio']:.2f} times the tokens/s (each repeat: {result['ratios'][0]:.2f} to "
        f"{result['ratios'][1]:.2f}); by the steps alone {result['bound']:.2f}\n"
        f"completions that differ: {result['differing']}, not from a near-tie on: "
        f"{result['differing_not_at_near_ties']}; log-probabilities of equal tokens differ by at most "
        f"{result['logps_apart']:.1e}"
    )


def main() -> None:
    options = tyro.cli(Options)
    result = measure(options)
    show(result, options)
    settings = {key: value for key, value in asdict(options).items() if key != "json"}
    write_json(options.json, {"machine": machine(), "options": settings} | result)


if __name__ == "__main__":
    main()
