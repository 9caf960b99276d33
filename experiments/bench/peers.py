"""Seconds of a GRPO step here, in TRL and in Tunix: one machine, one sitting, steps in turn.

    python -m experiments.bench.peers --trl-python TRL/bin/python --tunix-python TUNIX/bin/python

TRL and Tunix each live in an environment of their own, named by its Python: ``pip install trl`` (with PyTorch) in
one, ``pip install google-tunix`` in the other; a peer whose Python is not given is left out. Each system is a
process that builds its model, runs ``--warmup`` steps that don't count (they compile), and then runs a step when
it is told to. Steps alternate, and no two processes compute at a time. The table has the medians, ``--json`` takes
every step.

The same in all:
- the model: Llama's architecture with tied embeddings and the same layers, widths, heads, vocabulary and number of
  weights (which is checked); random float32 weights; layers recomputed in the backward pass where the model asks;
- the batch: P prompts of S random tokens, the same texts, and G completions a prompt of exactly T tokens (which is
  checked; the end-of-sequence id is one that the model has no logit for), temperature 1 without truncation;
- the step: roll out, decode to text, a reward that costs nothing, advantages; then one AdamW update with the
  gradient clipped by its norm, without a reference (beta 0), on the whole batch at once unless
  ``--*-micro-batches`` says otherwise. "rollout" is all that comes before the update;
- what is left out: compilation, logs, evaluation, checkpoints;
- the machine, with all of its cores, and the accelerator if there is one.

Not the same:
- the samples: each system draws its own, from weights of its own;
- the loss's aggregate: a mean over the batch's tokens here and in TRL, over completions in Tunix; completions of
  equal length make them equal in cost;
- the program: JAX here and in Tunix; in TRL PyTorch without compilation, which is its default, with PyTorch's
  fused attention and AdamW;
- generation: TRL's is that of Transformers on a CPU, and vLLM's where there is a GPU and vLLM is installed;
  Tunix's is its vanilla rollout;
- metrics: each computes its own in the update, and those of TRL and Tunix cannot be switched off;
- the versions of Python and libraries, which are printed.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from experiments.bench.peer_child import Problem
from experiments.bench.peer_process import ProcessFailed, StepProcess
from experiments.bench.shapes import BATCHES, MODELS

NOTE = (
    "The same in all: shape of the model, float32, prompts, lengths, reward, one AdamW update on the whole batch. "
    "Not the same: the samples drawn, metrics computed in the update, versions; TRL runs PyTorch without "
    'compilation. "rollout" is everything before the update. The ratio is of the medians of whole steps.'
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Time GRPO steps of this project, TRL and Tunix in turn."""

    trl_python: Path | None = None
    """Python of an environment with TRL; None leaves TRL out."""
    tunix_python: Path | None = None
    """Python of an environment with Tunix; None leaves Tunix out."""
    ours_python: Path = Path(sys.executable)
    """Python of an environment with this project."""
    models: tuple[Literal["tiny", "smollm2"], ...] = ("tiny", "smollm2")
    """Models of experiments/bench/shapes.py."""
    prompt_lengths: tuple[int, ...] = (66, 512)
    """S, tokens of every prompt."""
    repeats: int = 5
    """Steps of each system that count."""
    warmup: int = 2
    """Steps of each system before those; the first ones compile."""
    ours_micro_batches: int = 1
    """Parts of a batch whose gradients are summed, here."""
    trl_micro_batches: int = 1
    """The same in TRL."""
    tunix_micro_batches: int = 1
    """The same in Tunix."""
    reserve_gib: float = 1.0
    """A process is ended when, while it computes, the machine has less memory left than this."""
    timeout: float = 1800.0
    """Seconds that a single step, or setting up, may take."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json")] = None
    """Write every step to this file."""

    def __post_init__(self) -> None:
        for name in ("repeats", "warmup"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for model in self.models:
            for name in ("ours", "trl", "tunix"):
                parts, prompts = getattr(self, f"{name}_micro_batches"), BATCHES[model].prompts
                if parts < 1 or prompts % parts:
                    raise ValueError(
                        f"{name}_micro_batches must divide the {prompts} prompts of {model}, got {parts}"
                    )

    def systems(self) -> dict[str, Path]:
        """Name -> Python of what is compared."""
        pythons = {"ours": self.ours_python, "trl": self.trl_python, "tunix": self.tunix_python}
        return {name: python for name, python in pythons.items() if python is not None}


@dataclass
class Row:
    """One system on one problem."""

    model: str
    prompt: int
    system: str
    parameters: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    rollout: list[float] = field(default_factory=list)
    """Seconds, a value a step."""
    update: list[float] = field(default_factory=list)
    failure: str | None = None
    """How its process ended before it was told to."""

    @property
    def measured(self) -> bool:
        """Whether there is something to compare."""
        return self.failure is None and len(self.update) > 0

    @property
    def steps(self) -> list[float]:
        """Seconds of whole steps."""
        return [rollout + update for rollout, update in zip(self.rollout, self.update, strict=True)]

    def to_json(self) -> dict[str, Any]:
        """With the medians."""
        names = ("rollout", "update", "steps") if self.measured else ()
        return asdict(self) | {f"median_{name}": statistics.median(getattr(self, name)) for name in names}


def make_problem(model: str, prompt: int, micro_batches: int) -> Problem:
    """What the processes are told of a model and batch."""
    shape, batch = MODELS[model], BATCHES[model]
    names = (
        "vocab_size",
        "num_layers",
        "width",
        "ffn_width",
        "num_heads",
        "num_kv_heads",
        "rope_theta",
        "norm_eps",
    )
    return Problem(
        **{name: getattr(shape, name) for name in names},
        remat=shape.remat == "full",
        prompts=batch.prompts,
        group=batch.group,
        prompt=prompt,
        completion=batch.completion,
        micro_batches=micro_batches,
    )


def compare(found: Sequence[Row], options: Options) -> None:
    """Set the systems of one problem up, let them run steps in turn, and fill in their rows."""
    rows = {row.system: row for row in found}
    model, prompt = found[0].model, found[0].prompt
    processes: dict[str, StepProcess] = {}

    try:
        for name, python in options.systems().items():
            problem = make_problem(model, prompt, getattr(options, f"{name}_micro_batches"))
            processes[name] = StepProcess(
                [str(python), "-m", f"experiments.bench.peer_{name}"],
                timeout=options.timeout,
                reserve_bytes=int(options.reserve_gib * 2**30),
            )
            built = attempt(rows[name], processes[name], asdict(problem))
            if built is not None:
                rows[name].parameters, rows[name].versions = built["parameters"], built["versions"]
            for _ in range(options.warmup):
                attempt(rows[name], processes[name], "step")
        tokens = BATCHES[model].tokens
        for repeat in range(options.repeats):
            for name in in_turn(list(rows), repeat):
                answer = attempt(rows[name], processes[name], "step")
                if answer is not None:
                    check(name, answer["tokens"], tokens, "completion tokens")
                    rows[name].rollout.append(answer["rollout"])
                    rows[name].update.append(answer["update"])
                    print(f"  {name}: {rows[name].steps[-1]:.3f} s", file=sys.stderr, flush=True)
    finally:
        for process in processes.values():
            process.close()
    for name, row in rows.items():
        if row.measured:
            check(name, row.parameters, max(other.parameters for other in found), "weights")


def attempt(row: Row, process: StepProcess, request: Any) -> dict[str, Any] | None:
    """The answer to a request; None, with the failure noted, once the process has ended."""
    if row.failure is not None:
        return None
    try:
        return process.request(request)
    except ProcessFailed as failure:
        row.failure = str(failure)
        return None


def in_turn(names: list[str], repeat: int) -> list[str]:
    """The systems in an order that starts with another one in each repeat."""
    first = repeat % len(names)
    return names[first:] + names[:first]


def check(name: str, got: int, wanted: int, what: str) -> None:
    """Refuse to compare what is not the same.

    Raises:
        ValueError: it isn't.
    """
    if got != wanted:
        raise ValueError(f"{name} has {got} {what}, but the comparison is of {wanted}")


def ratios(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Ours / theirs of the medians of steps, for each peer that has some."""
    ours = {(row.model, row.prompt): row for row in rows if row.system == "ours" and row.measured}
    for row in rows:
        mine = ours.get((row.model, row.prompt))
        if row.system != "ours" and row.measured and mine is not None:
            ratio = statistics.median(mine.steps) / statistics.median(row.steps)
            yield {"model": row.model, "prompt": row.prompt, "peer": row.system, "ratio": ratio}


def table(rows: Sequence[Row]) -> str:
    """Markdown, a line a system: median seconds, the range of its steps, and ours / theirs."""
    of_row = {(r["model"], r["prompt"], r["peer"]): f"{r['ratio']:.2f}" for r in ratios(rows)}
    lines = [
        ("model", "S", "system", "rollout s", "update s", "step s", "steps, least to most", "ours / theirs"),
        ("---",) * 8,
    ]
    for row in rows:
        key = (row.model, row.prompt, row.system)
        if not row.measured:
            said = row.failure or "not measured"
            lines.append((row.model, str(row.prompt), row.system, said, "", "", "", ""))
            continue
        medians = (f"{statistics.median(values):.3f}" for values in (row.rollout, row.update, row.steps))
        spread = f"{min(row.steps):.3f} to {max(row.steps):.3f}"
        lines.append((row.model, str(row.prompt), row.system, *medians, spread, of_row.get(key, "")))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_json(file: Path, rows: Sequence[Row], options: Options) -> None:
    """Everything that was measured, and on what."""
    file.parent.mkdir(parents=True, exist_ok=True)
    names = ("repeats", "warmup", "ours_micro_batches", "trl_micro_batches", "tunix_micro_batches")
    values = {
        "machine": {"system": platform.platform(), "cores": os.cpu_count()},
        "options": {name: getattr(options, name) for name in names},
        "rows": [row.to_json() for row in rows],
        "ratios": list(ratios(rows)),
    }
    file.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n")


def report(rows: Sequence[Row], options: Options) -> None:
    """Print the table with what it is of, and write the file."""
    if options.json is not None:
        write_json(options.json, rows, options)
    versions = {row.system: row.versions for row in rows if row.versions}
    for system, packages in versions.items():
        print(f"{system}: {', '.join(f'{name} {number}' for name, number in packages.items())}")
    print(f"\n{table(rows)}\n\n{NOTE}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write what is asked for; 2 for a mistake in the arguments."""
    options = tyro.cli(Options, args=arguments, prog="peers.py")
    # So that the processes end with this one.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    rows: list[Row] = []
    try:
        for model in options.models:
            for prompt in options.prompt_lengths:
                print(f"{model}, prompts of {prompt} tokens", file=sys.stderr, flush=True)
                rows += (new := [Row(model, prompt, name) for name in options.systems()])
                compare(new, options)
    except (ValueError, OSError) as problem:
        print(f"peers.py: error: {problem}", file=sys.stderr)
        return 2
    finally:
        # What there is counts, also where it was interrupted.
        report(rows, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
