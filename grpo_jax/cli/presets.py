"""``grpo-jax presets``: published recipes, printed."""

from __future__ import annotations

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from grpo_jax.algorithms.presets import NOTATION, PRESETS, Preset, find_preset
from grpo_jax.cli.options import PresetsOptions, parse
from grpo_jax.console import Console


def run_presets(arguments: list[str]) -> int:
    """Print all recipes with paper and departures, or the one that is named."""
    options = parse(PresetsOptions, arguments, prog="grpo-jax presets")
    parts = [_table()] if options.name is None else _page(options.name, find_preset(options.name))
    console = RichConsole(highlight=False, emoji=False)
    for part in (*parts, Text(f"\nFormulas: {NOTATION}.")):
        console.print(part)
    return 0


def announce_preset(name: str) -> None:
    """Say, once over all processes, which recipe the run begins with and what it sets."""
    import jax

    preset = find_preset(name)
    fields = "".join(f", {field}={value}" for field, value in preset.beside)
    with Console(enabled=jax.process_index() == 0) as console:
        console.message(
            f"preset {name} ({preset.source}): its objective{fields}; fields given as options come after"
        )


def _table() -> RenderableType:
    table = Table(show_lines=True, expand=True)
    table.add_column("preset", no_wrap=True)
    table.add_column("paper", no_wrap=True)
    table.add_column("formula, and where it departs from paper or code", ratio=1)
    for name, preset in PRESETS.items():
        cell = Table.grid()
        cell.add_row(Text(preset.title, style="bold"))
        for line in preset.formula:
            cell.add_row(Padding(Text(line), (0, 0, 0, 2)))
        cell.add_row(_bullets(preset.departures))
        table.add_row(Text(name), Text(preset.paper), cell)
    return table


def _page(name: str, preset: Preset) -> list[RenderableType]:
    command = "grpo-jax train EXPERIMENT.py"
    fields = [f"{command} \\", *(f"    {option} \\" for option in preset.options())]
    return [
        Text(preset.title, style="bold"),
        Text(f"{preset.source}\n"),
        *(Padding(Text(line), (0, 0, 0, 2)) for line in preset.formula),
        Text(f"\n{command} --preset {name}\n"),
        Text("is the same as the following, where the experiment leaves the rest at its defaults:\n"),
        Text("\n".join(fields).removesuffix(" \\")),
        Text("\nDepartures", style="bold"),
        _bullets(preset.departures),
    ]


def _bullets(lines: tuple[str, ...]) -> Table:
    """A list whose wrapped lines are indented."""
    table = Table.grid(padding=(0, 1, 0, 0))
    for line in lines:
        table.add_row("-", Text(line))
    return table
