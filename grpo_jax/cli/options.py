"""The options of the commands, and how they are read from the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

from grpo_jax.algorithms.presets import apply_preset
from grpo_jax.config import Config

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train on an experiment; the fields of its config, with the experiment's own defaults, are below."""

    workdir: Path | None = None
    """The run's folder. One that holds a run goes on from its last checkpoint. None:
    runs/EXPERIMENT-DATE-TIME."""
    fresh: bool = False
    """Start from the beginning in a workdir that holds a run already."""
    preset: str | None = None
    """Begin with a published recipe: its objective, and what else it names, replace the experiment's; options of
    single fields override it. `grpo-jax presets` lists them."""
    dry_run: bool = False
    """Train nothing and write nothing: build the run, compile its stages (all but the supervised start), print the
    memory, the arithmetic and the compile time of each, and what a device has to hold at the peak."""
    config: Annotated[Config, tyro.conf.arg(name="")]


@dataclass(frozen=True, kw_only=True)
class PresetsOptions:
    """Print the published recipes that `grpo-jax train --preset NAME` knows, or one of them in full."""

    name: tyro.conf.Positional[str | None] = None
    """The recipe to print. None: all of them."""


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Measure a run's checkpoint on held-out problems."""

    run: tyro.conf.Positional[Path]
    """The run's folder."""
    checkpoint: str = "latest"
    """"latest", "best" (by held-out success rate), or a step."""
    samples: int | None = None
    """Samples a problem. None: the run's eval.samples."""
    num_problems: int | None = None
    """Use only so many held-out problems. None: all."""
    temperature: float | None = None
    """Sampling temperature; 0 is greedy. None: the run's eval.temperature."""
    seed: int = 0
    """Seed of the samples."""
    json: Path | None = None
    """Write the report to this file as well."""

    def __post_init__(self) -> None:
        _check_checkpoint(self.checkpoint)
        _check_at_least(1, samples=self.samples, num_problems=self.num_problems)
        _check_at_least(0, temperature=self.temperature)


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Sample completions of a run's checkpoint: of one prompt, or of each line that is typed."""

    run: tyro.conf.Positional[Path]
    """The run's folder."""
    prompt: str | None = None
    """The prompt, written as the task writes its own (a conversation: the user's turn). None: read prompts
    from the terminal, one a line, until Ctrl-D."""
    checkpoint: str = "latest"
    """"latest", "best" (by held-out success rate), or a step."""
    samples: int = 1
    """Completions a prompt."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    """Keep the most probable tokens that hold this much probability; 1 keeps all."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this many times as probable as the best one; 0 keeps all."""
    seed: int = 0
    """Seed of the first prompt's samples; each prompt that follows takes the next."""

    def __post_init__(self) -> None:
        _check_checkpoint(self.checkpoint)
        _check_at_least(1, samples=self.samples)
        _check_at_least(0, temperature=self.temperature, top_k=self.top_k, min_p=self.min_p)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p must be in (0, 1], got {self.top_p}")
        if self.min_p >= 1:
            raise ValueError(f"--min-p must be in [0, 1), got {self.min_p}")


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write a run's policy as a Hugging Face checkpoint folder (float32)."""

    run: tyro.conf.Positional[Path]
    """The run's folder."""
    folder: tyro.conf.Positional[Path]
    """The folder to write; it must not exist."""
    checkpoint: str = "latest"
    """"latest", "best" (by held-out success rate), or a step."""

    def __post_init__(self) -> None:
        _check_checkpoint(self.checkpoint)


def parse(options: type[T], arguments: Sequence[str], *, prog: str, default: T | None = None) -> T:
    """Read ``options`` from the arguments; an unknown one ends the process with status 2.

    Raises:
        ValueError: the values together are refused by ``options`` itself.
    """
    if default is None:
        return tyro.cli(options, args=arguments, prog=prog)
    return tyro.cli(options, args=arguments, prog=prog, default=default)


def parse_train(experiment: Config, arguments: Sequence[str], *, prog: str) -> TrainOptions:
    """The options of ``train``: the experiment's config, then the preset, then what is given field by field.

    Raises:
        ValueError: an unknown preset, or values that are refused.
    """

    def read(config: Config) -> TrainOptions:
        return parse(TrainOptions, arguments, prog=prog, default=TrainOptions(config=config))

    name = _named_preset(arguments)
    if name is None:
        return read(experiment)
    options = read(apply_preset(experiment, name))
    length = options.config.rollout.max_completion_length
    if length == experiment.rollout.max_completion_length:
        return options
    # The preset's overlong penalty follows the limit of lengths, which an option has changed.
    rollout = replace(experiment.rollout, max_completion_length=length)
    return read(apply_preset(replace(experiment, rollout=rollout), name))


def _named_preset(arguments: Sequence[str]) -> str | None:
    """What the last --preset names; None where there is none. A missing value is the parser's to refuse."""
    found = None
    for argument, following in pairwise([*arguments, None]):
        flag, equals, value = (argument or "").partition("=")
        if flag == "--preset":
            found = value if equals else following
    return None if found == "None" else found


def take_experiment(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Split the experiment file off the arguments: the first one, or else the first that ends in .py."""
    for index, argument in enumerate(arguments):
        if not argument.startswith("-") and (index == 0 or argument.endswith(".py")):
            return Path(argument), [*arguments[:index], *arguments[index + 1 :]]
    return None, list(arguments)


def _check_checkpoint(checkpoint: str) -> None:
    if checkpoint not in ("latest", "best") and not checkpoint.isdecimal():
        raise ValueError(f'--checkpoint must be "latest", "best" or a step, got {checkpoint!r}')


def _check_at_least(smallest: float, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not value >= smallest:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {smallest}, got {value}")
