"""Memory and time of the update under each way of recomputing activations.

    python -m experiments.bench.remat [--model tiny] [--prompt 66] [--json remat.json]

``none`` keeps every activation, ``dots`` the outputs of matrix products and of attention, ``full`` the input of
each layer or block of layers. Up to four layers, ``none`` alone has no loop over them. Memory is the compiled
program's temporaries; ``--repeats 0`` compiles only. ``tiny`` with prompts of 66 tokens, 2 CPU cores, Python 3.12,
JAX 0.12.0.1, float32, seed 0, 2026-12-05:

    =============  ===========  ======
    policy         temporaries  update
    =============  ===========  ======
    none           481 MiB      0.66 s
    dots           321 MiB      0.79 s
    full           186 MiB      0.79 s
    full, every 2  308 MiB      1.03 s
    =============  ===========  ======
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from experiments.bench.measure import Stages, machine, with_changes, write_json
from experiments.bench.shapes import BATCHES, MODELS, ModelName, require_at_least
from grpo_jax.models.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare what the backward pass recomputes."""

    model: ModelName = "tiny"
    """A shape of experiments/bench/shapes.py."""
    prompt: int | None = None
    """S, tokens of every prompt. None: the shape's own."""
    repeats: int = 3
    """Timed updates; 0: only memory."""
    json: Path | None = None
    """Write all numbers to this file as well."""

    def __post_init__(self) -> None:
        require_at_least(0, self, "repeats")
        if self.prompt is not None:
            require_at_least(1, self, "prompt")


def variants(model: DecoderConfig) -> dict[str, DecoderConfig]:
    """Each policy, and ``full`` in blocks of several layers."""
    found = {remat: with_changes(model, remat=remat) for remat in ("none", "dots", "full")}
    divisors = (k for k in range(2, model.num_layers) if model.num_layers % k == 0)
    return found | {f"full, every {k}": with_changes(model, remat="full", remat_every=k) for k in divisors}


def measure(options: Options) -> list[dict[str, Any]]:
    """One row a variant."""
    sizes = BATCHES[options.model]
    if options.prompt is not None:
        sizes = replace(sizes, prompt=options.prompt)
    rows = []
    for name, model in variants(MODELS[options.model]).items():
        timing = Stages(model, sizes).time_update(options.repeats)
        rows.append(
            {
                "remat": name,
                "temporaries": timing.program.temporaries,
                "seconds": timing.seconds if options.repeats else None,
                "compile_seconds": timing.program.seconds,
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Memory and time, also relative to keeping everything."""
    table = Table("remat")
    for heading in ("temporaries\nMiB", "of none", "s", "of none", "compile s"):
        table.add_column(heading, justify="right")
    first = rows[0]
    for row in rows:
        timed = row["seconds"] is not None
        table.add_row(
            row["remat"],
            f"{row['temporaries'] / 2**20:.0f}",
            f"{row['temporaries'] / first['temporaries']:.2f}",
            f"{row['seconds']:.4g}" if timed else "-",
            f"{row['seconds'] / first['seconds']:.2f}" if timed else "-",
            f"{row['compile_seconds']:.1f}",
        )
    Console(highlight=False).print(table)


if __name__ == "__main__":
    options = tyro.cli(Options)
    measured = measure(options)
    show(measured)
    write_json(options.json, {"machine": machine(), "model": options.model, "rows": measured})
