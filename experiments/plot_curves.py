"""Curves of one or more runs, a panel a metric, as one picture.

python experiments/plot_curves.py runs/a runs/b --labels "seed 0" "seed 1" --out curves.png
"""

from __future__ import annotations

import difflib
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from grpo_jax.metrics import metric_meaning, read_metrics

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
DASHES = ("-", "--", ":")
INK = "#333333"
FAINT = "#e4e4e4"
FEW_POINTS = 25

Records = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Plot metrics of runs over their steps."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs."""
    metric: tuple[str, ...] = ()
    """Metrics, a panel each. None named: the success rate, and the KL divergence if a run has it."""
    labels: tuple[str, ...] = ()
    """A label a run, in their order. None given: the names of the folders."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE.png")] = Path("curves.png")
    """The picture; its ending chooses the format (png, svg, pdf)."""


def read_runs(folders: Sequence[Path], labels: Sequence[str]) -> dict[str, Records]:
    """Label -> records of each run.

    Raises:
        ValueError: no run is named, the labels don't fit the runs, or a run has no records.
        FileNotFoundError: a folder holds no metrics.
    """
    if not folders:
        raise ValueError("name at least one folder of a run")
    labels = labels or [folder.resolve().name for folder in folders]
    if len(labels) != len(folders) or len(set(labels)) != len(labels):
        raise ValueError(f"--labels must be {len(folders)} different ones, one a run, got {list(labels)}")
    runs = {label: read_metrics(folder / "metrics.jsonl") for label, folder in zip(labels, folders, strict=True)}
    for (label, records), folder in zip(runs.items(), folders, strict=True):
        if not records:
            raise ValueError(f"run {label!r}: {folder / 'metrics.jsonl'} holds no step yet")
    return runs


def choose_metrics(runs: dict[str, Records], asked: Sequence[str]) -> Sequence[str]:
    """The metrics to plot: those asked for, or the success rate and the KL divergence if it is there.

    Raises:
        ValueError: no run has a metric that was asked for.
    """
    known = {name for records in runs.values() for record in records for name in record} - {"step", "time"}
    if not asked:
        return [name for name in ("Performance/SuccessRate", "Policy/KL") if name in known]
    for name in asked:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or sorted(known)
            raise ValueError(f"--metric: no run has {name!r}; there are {', '.join(near)}")
    return asked


def draw(runs: dict[str, Records], metrics: Sequence[str]) -> Figure:
    """One panel a metric, one line a run; runs without a metric are left out of its panel."""
    figure = Figure(figsize=(9.0, 3.6 if len(runs) > 1 else 3.2), layout="constrained")
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for axes, metric in zip(panels, metrics, strict=True):
        for index, (label, records) in enumerate(runs.items()):
            points = [(record["step"], record[metric]) for record in records if metric in record]
            axes.plot(
                [step for step, _ in points],
                # What was not finite is null in the file, and a gap in the line.
                [float("nan") if value is None else value for _, value in points],
                label=label,
                color=COLORS[index % len(COLORS)],
                linestyle=DASHES[index // len(COLORS) % len(DASHES)],
                marker="o" if len(points) <= FEW_POINTS else "",
                markersize=3.5,
                linewidth=1.5,
                clip_on=False,
            )
        style(axes, metric, title_width=110 // len(metrics))
    if len(runs) > 1:
        figure.legend(
            handles=panels[0].get_lines(),
            loc="outside upper left",
            ncols=min(len(runs), 5),
            frameon=False,
            fontsize=10,
            labelcolor=INK,
        )
    return figure


def style(axes: Axes, metric: str, *, title_width: int) -> None:
    """Title, scales and a quiet grid."""
    meaning = metric_meaning(metric) or metric
    axes.set_title(textwrap.fill(meaning, title_width), loc="left", fontsize=10, color=INK)
    axes.set_xlabel("step", fontsize=10, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    axes.margins(x=0.01)
    if meaning.startswith("Share"):
        axes.set_ylim(-0.02, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9.5, length=0, colors=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(INK)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the picture that the arguments ask for; 2 for a mistake in them, as the commands of the package."""
    options = tyro.cli(Options, args=arguments, prog="plot_curves.py")
    try:
        runs = read_runs(options.runs, options.labels)
        figure = draw(runs, choose_metrics(runs, options.metric))
        options.out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(options.out, dpi=150)
    except (ValueError, OSError) as error:
        print(f"plot_curves.py: error: {error}", file=sys.stderr)
        return 2
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
