"""Speed, share of the machine's ceilings, compile time and memory of a step's stages.

    python -m experiments.bench.step --models tiny smollm2 --prompt-lengths 66 512 [--json step.json]

Random weights, completions of exactly T tokens, no reference, AdamW, one update a batch. A share is what is needed
(:mod:`grpo_jax.models.flops`: no recomputation, no padding) over what the ceilings of
:mod:`experiments.bench.ceilings`, measured in the same run, allow in the same time: the best of those measured
before and after each case, with a warning where they disagree, since then something else used the machine.
"bandwidth" belongs to the rollout: weights and filled cache read once a step. Seconds are medians, after a first
call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import tyro
from rich.console import Console
from rich.table import Table

from experiments.bench.ceilings import Ceilings, best_of, disturbance, measure_ceilings
from experiments.bench.measure import Stages, Timing, machine, peak_rss, with_changes, write_json
from experiments.bench.shapes import BATCHES, MODELS, ModelName, require_at_least
from grpo_jax.allocator import keep_freed_memory
from grpo_jax.models.config import DecoderConfig
from grpo_jax.models.flops import BatchSizes, forward_flops, rollout_bytes, update_flops

Row = dict[str, Any]

# Ceilings of a quiet machine differ by less.
DISTURBED = 0.1


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure rollout, log-probabilities and update."""

    models: tuple[ModelName, ...] = ("tiny",)
    """Shapes of experiments/bench/shapes.py."""
    prompt_lengths: tuple[int, ...] = (66, 512)
    """S, tokens of every prompt."""
    repeats: int = 5
    """Timed calls of a stage."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of activations and caches. None: the model's own."""
    remat: Literal["none", "dots", "full"] | None = None
    """What the backward pass recomputes. None: the model's own."""
    json: Path | None = None
    """Write all numbers to this file as well."""

    def __post_init__(self) -> None:
        require_at_least(1, self, "prompt_lengths", "repeats")


def measure(name: str, model: DecoderConfig, sizes: BatchSizes, repeats: int) -> Iterator[Row]:
    """One row a stage, without shares."""
    stages = Stages(model, sizes)
    rollout, _ = stages.time_rollout(repeats)
    timings = {
        "rollout": (rollout, forward_flops(model, sizes), rollout_bytes(model, sizes)),
        "score": (stages.time_score(repeats), forward_flops(model, sizes), None),
        "update": (stages.time_update(repeats), update_flops(model, sizes), None),
    }
    for stage, (timing, flops, traffic) in timings.items():
        case = {"model": name, "prompt": sizes.prompt, "compute_dtype": model.compute_dtype, "stage": stage}
        yield case | _numbers(timing, flops, traffic, sizes)


def with_shares(row: Row, ceilings: Ceilings) -> Row:
    """The row with its shares of the ceilings of all devices."""
    seconds, traffic = row["seconds"] * jax.device_count(), row["needed_bytes"]
    return row | {
        "flops_share": row["needed_flops"] / seconds / ceilings.flops(row["compute_dtype"]),
        "bandwidth_share": None if traffic is None else traffic / seconds / ceilings.bandwidth,
    }


def _numbers(timing: Timing, flops: int, traffic: int | None, sizes: BatchSizes) -> Row:
    seconds, program = timing.seconds, timing.program
    return {
        "seconds": seconds,
        "tokens_per_second": sizes.tokens / seconds,
        "needed_flops": flops,
        "needed_bytes": traffic,
        "compile_seconds": program.seconds,
        "compilations": timing.compilations,
        "temporaries": program.temporaries,
        "arguments": program.arguments,
        "output": program.output,
        "process_peak": peak_rss(),
    }


def show(rows: list[Row], title: str) -> None:
    """The rows as a table; memory in MiB."""
    table = Table(title=title, title_justify="left")
    for heading in ("model", "S", "stage"):
        table.add_column(heading)
    for heading in (
        "s",
        "tok/s",
        "GFLOP",
        "FLOP/s\nshare",
        "bandwidth\nshare",
        "compile\ns",
        "pro-\ngrams",
        "temp\nMiB",
        "args\nMiB",
        "out\nMiB",
        "process\npeak MiB",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        memory = (row[name] / 2**20 for name in ("temporaries", "arguments", "output", "process_peak"))
        share = row["bandwidth_share"]
        table.add_row(
            row["model"],
            str(row["prompt"]),
            row["stage"],
            f"{row['seconds']:.4g}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['needed_flops'] / 1e9:.4g}",
            f"{100 * row['flops_share']:.1f} %",
            "-" if share is None else f"{100 * share:.1f} %",
            f"{row['compile_seconds']:.1f}",
            str(row["compilations"]),
            *(f"{size:.0f}" for size in memory),
        )
    Console(width=130, highlight=False).print(table)


def main() -> None:
    options = tyro.cli(Options)
    keep_freed_memory()
    measured = [measure_ceilings()]
    rows: list[Row] = []
    for name in options.models:
        model = with_changes(MODELS[name], compute_dtype=options.compute_dtype, remat=options.remat)
        for length in options.prompt_lengths:
            rows += measure(name, model, replace(BATCHES[name], prompt=length), options.repeats)
            measured.append(measure_ceilings())
    ceilings, disturbed = best_of(measured), disturbance(measured)
    rows = [with_shares(row, ceilings) for row in rows]
    show(rows, ", ".join(f"{key} {value}" for key, value in machine().items()))
    print(ceilings.describe())
    if disturbed > DISTURBED:
        print(
            f"WARNING: float32 ceilings differed by {100 * disturbed:.0f} %: the machine was busy, measure again"
        )
    result = {"machine": machine(), "ceilings": asdict(ceilings), "disturbance": disturbed, "rows": rows}
    write_json(options.json, result)


if __name__ == "__main__":
    main()
