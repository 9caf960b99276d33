"""What ``grpo-jax eval`` and ``grpo-jax train --dry-run`` print."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

from grpo_jax.config import Config
from grpo_jax.console import Console

if TYPE_CHECKING:
    from grpo_jax.evaluate import EvalReport
    from grpo_jax.tasks.base import Task
    from grpo_jax.train.dry_run import DryRun, Stage

# Where the output is no terminal, lines are as long as the tables need.
_PIPED_WIDTH = 120


def print_report(report: EvalReport, *, title: str) -> None:
    """The estimates with their intervals, as a table."""
    rows = {
        "greedy accuracy": report.greedy_accuracy,
        "success rate": report.success_rate,
        **{f"pass@{k}": estimate for k, estimate in report.pass_at.items()},
        **{f"maj@{k}": estimate for k, estimate in report.maj_at.items()},
    }
    table = Table("", title=Text(title), title_justify="left")
    table.add_column("estimate", justify="right")
    table.add_column("95 % interval", justify="right")
    for name, estimate in rows.items():
        interval = f"{100 * estimate.low:.1f} - {100 * estimate.high:.1f} %"
        table.add_row(name, f"{100 * estimate.value:.1f} %", interval)
    console = RichConsole(highlight=False, emoji=False)
    console.print(table)
    console.print(
        f"{report.num_problems} problems, {report.samples} samples each at temperature "
        f"{report.temperature:g}; {report.mean_length:.1f} tokens a sample, "
        f"{100 * report.truncated_share:.1f} % cut off",
        soft_wrap=True,
    )


def run_dry(config: Config, task: Task | None) -> None:
    """Compile a run, and print what it takes (the first process alone)."""
    import jax

    from grpo_jax.train.dry_run import dry_run

    is_first = jax.process_index() == 0
    with Console(enabled=is_first) as console, console.progress("compiled programs") as show:
        run = dry_run(config, task=task, on_compiled=show)
    if is_first:
        print_dry_run(run, title=f"{config.experiment}: dry run")


def print_dry_run(run: DryRun, *, title: str) -> None:
    """The stages as a table, and the totals."""
    console = RichConsole(highlight=False, emoji=False)
    if not console.is_terminal:
        console = RichConsole(highlight=False, emoji=False, width=_PIPED_WIDTH)
    table = Table("stage", "shapes", title=Text(title), title_justify="left")
    for heading in (
        "arguments\nMiB",
        "temporaries\nMiB",
        "output\nMiB",
        "peak\nMiB",
        "needed\nTFLOP",
        "compiled\ns",
    ):
        table.add_column(heading, justify="right")
    for stage in run.stages:
        program = stage.program
        memory = (program.arguments, program.temporaries, program.output, run.peak(stage))
        table.add_row(
            _names(stage),
            _shapes(stage),
            *(_mebibytes(size) for size in memory),
            f"{stage.works[0].flops / 1e12:.3g}" if stage.works[0].flops else "-",
            f"{program.seconds:.1f}",
        )
    console.print(table)
    for line in _totals(run):
        console.print(line, soft_wrap=True)


def _names(stage: Stage) -> str:
    """What the program is for; what it is called for several times is counted."""
    calls = Counter(work.name for work in stage.works)
    return "\n".join(name if count == 1 else f"{name} x {count}" for name, count in calls.items())


def _shapes(stage: Stage) -> str:
    # One program: all that it is called for has the same shapes.
    work = stage.works[0]
    sizes = work.sizes
    shapes = [f"P {sizes.prompts} G {sizes.group} S {sizes.prompt} T {sizes.completion}"]
    if work.slots is not None:
        shapes.append(f"slots {work.slots[0]} x {work.slots[1]}")
    return "\n".join([*shapes, *filter(None, [work.lengths])])


def _totals(run: DryRun) -> list[str]:
    state = run.params + run.optimizer + run.reference
    peak, stage = max(((run.peak(stage), stage) for stage in run.stages), key=lambda pair: pair[0])
    fits = "the memory of a device is not known here"
    if run.capacity is not None:
        fits = f"{100 * peak / run.capacity:.1f} % of the device's {_mebibytes(run.capacity)} MiB"
        if peak > run.capacity:
            fits += ": IT DOES NOT FIT"
    seconds = sum(stage.program.seconds for stage in run.stages)
    return [
        f"{run.num_params / 1e6:.2f} M parameters, {run.num_devices} x {run.device_kind}; memory: of each device",
        f"state: {_mebibytes(state)} MiB = parameters {_mebibytes(run.params)} + optimizer "
        f"{_mebibytes(run.optimizer)} + reference {_mebibytes(run.reference)}",
        f"peak: {_mebibytes(peak)} MiB, in {stage.works[0].name} (state, the stage's other arguments, temporaries "
        f"and new output); {fits}",
        f"{len(run.stages)} programs, {seconds:.1f} s to compile; TFLOP are those of one call on all devices, "
        "with every prompt and completion of full length",
    ]


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f}"
