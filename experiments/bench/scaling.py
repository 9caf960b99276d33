"""How the cost of rollout and update grows with P, G, T and the chunk of logits.

    python -m experiments.bench.scaling [--json scaling.json]

One size at a time goes over a 16-fold range, the others at their smallest but as many tokens as keep the machine
busy. The exponent is the slope of log seconds over log size, by least squares: 1 is proportional, less means that
small sizes leave the machine idle. T is attended to, so its needed arithmetic grows a little faster than itself;
the exponent of the needed arithmetic is printed beside. The chunk (train.logps_chunk) changes memory, and should
change no time: an exponent near 0.

``tiny``'s shape, 2 CPU cores, Python 3.12, JAX 0.12.0.1, float32, 2026-12-07, rollout and update: prompts 2 to 32
0.70 and 0.93, group 8 to 128 0.71 and 0.95, completion 32 to 512 1.20 and 1.12 (needed arithmetic 1.02; measured
twice more at once: 1.11 and 1.03, 1.08 and 0.99), chunk 256 to 4096 -0.03 and -0.03.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from experiments.bench.measure import Stages, machine, write_json
from experiments.bench.shapes import MODELS, ModelName, require_at_least
from grpo_jax.models.flops import BatchSizes, forward_flops, update_flops

FACTORS = (1, 2, 4, 8, 16)
SMALLEST = BatchSizes(prompts=2, group=8, prompt=32, completion=32)
SMALLEST_CHUNK = 256


@dataclass(frozen=True, kw_only=True)
class Options:
    """Fit the growth of the cost with P, G, T and train.logps_chunk."""

    model: ModelName = "tiny"
    """A shape of experiments/bench/shapes.py."""
    repeats: int = 3
    """Timed calls of a stage."""
    json: Path | None = None
    """Write all numbers to this file as well."""

    def __post_init__(self) -> None:
        require_at_least(1, self, "repeats")


def exponent(sizes: list[int], costs: list[float]) -> float:
    """The slope of log cost over log size."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def measure(model_name: str, axis: str, repeats: int) -> dict[str, Any]:
    """Seconds and needed arithmetic over the range of one size."""
    model = MODELS[model_name]
    result: dict[str, Any] = {"axis": axis, "sizes": [], "rollout": [], "update": []}
    result |= {"rollout_flops": [], "update_flops": []}
    for factor in FACTORS:
        if axis == "chunk":
            sizes, chunk = replace(SMALLEST, prompts=SMALLEST.prompts * 8), SMALLEST_CHUNK * factor
            result["sizes"].append(chunk)
        else:
            sizes, chunk = replace(SMALLEST, **{axis: getattr(SMALLEST, axis) * factor}), 2048
            result["sizes"].append(getattr(sizes, axis))
        stages = Stages(model, sizes, logps_chunk=chunk)
        result["rollout"].append(stages.time_rollout(repeats)[0].seconds)
        result["update"].append(stages.time_update(repeats).seconds)
        result["rollout_flops"].append(forward_flops(model, sizes))
        result["update_flops"].append(update_flops(model, sizes))
    return result | {
        f"{name}_exponent": exponent(result["sizes"], result[name])
        for name in ("rollout", "update", "rollout_flops", "update_flops")
    }


def show(results: list[dict[str, Any]]) -> None:
    """One row a size and stage."""
    table = Table("size", "range", "stage", "seconds")
    table.add_column("exponent", justify="right")
    table.add_column("of needed\nFLOP", justify="right")
    for result in results:
        for stage in ("rollout", "update"):
            table.add_row(
                result["axis"],
                f"{result['sizes'][0]} - {result['sizes'][-1]}",
                stage,
                " ".join(f"{seconds:.3g}" for seconds in result[stage]),
                f"{result[f'{stage}_exponent']:.2f}",
                f"{result[f'{stage}_flops_exponent']:.2f}",
            )
    Console(width=110, highlight=False).print(table)


if __name__ == "__main__":
    options = tyro.cli(Options)
    measured = [
        measure(options.model, axis, options.repeats) for axis in ("prompts", "group", "completion", "chunk")
    ]
    show(measured)
    write_json(options.json, {"machine": machine(), "results": measured})
