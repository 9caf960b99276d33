"""The command line: ``grpo-jax train | eval | sample | export | presets``.

JAX is imported only once the arguments have been read, so that help and mistakes are answered at once.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpo_jax
from grpo_jax.cli.experiment import load_experiment
from grpo_jax.cli.options import EvalOptions, ExportOptions, SampleOptions, parse, parse_train, take_experiment
from grpo_jax.cli.presets import announce_preset, run_presets
from grpo_jax.cli.tables import print_report, run_dry
from grpo_jax.config import Config
from grpo_jax.console import Console, printable

if TYPE_CHECKING:
    from grpo_jax.tasks.base import Example
    from grpo_jax.train.policy import Policy

OVERVIEW = """\
usage: grpo-jax {train,eval,sample,export,presets} ...

Group relative policy optimization of language models.

  grpo-jax train EXPERIMENT.py [--workdir DIR] [--preset NAME] [--dry-run] [--SECTION.FIELD VALUE ...]
      Train. Every field of the experiment's config can be overridden; the same command with
      --workdir goes on from the last checkpoint. --dry-run only compiles the run, and prints
      the memory, arithmetic and compile time of each stage.
  grpo-jax eval RUN [--checkpoint latest|best|STEP] [--json FILE]
      Measure success rate, pass@k and maj@k of a run's checkpoint on held-out problems.
  grpo-jax sample RUN [--prompt TEXT]
      Talk to a run's checkpoint.
  grpo-jax export RUN FOLDER
      Write a checkpoint as a Hugging Face folder.
  grpo-jax presets [NAME]
      Print the published recipes that --preset knows, with their papers.

examples:
  grpo-jax train experiments/quickstart.py
  grpo-jax train experiments/quickstart.py --workdir runs/a --rollout.group-size 8 --train.steps 50
  grpo-jax eval runs/a --checkpoint best --json runs/a/eval.json
  grpo-jax sample runs/a --prompt "482610>" --samples 4

`grpo-jax COMMAND --help` explains every option; `grpo-jax --version` prints the version.
GRPO_JAX_TRACEBACK=1 shows where an error was raised.
"""

STOPPED = 1
USER_ERROR = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0 is success, 1 a run that had to stop (its gradients stayed infinite or NaN), 2 a mistake of the user,
    and 130 an interruption by Ctrl-C.

    Args:
        argv: the arguments after the program's name; those of the process by default.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(OVERVIEW, end="")
        return 0
    if arguments[0] == "--version":
        print(f"grpo-jax {grpo_jax.__version__}")
        return 0
    # transformers advises to install PyTorch, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        with _plain_warnings():
            return _command(arguments[0])(arguments[1:])
    except KeyboardInterrupt as stop:
        print(f"grpo-jax: {stop}" if str(stop) else "", file=sys.stderr)
        return INTERRUPTED
    except FloatingPointError as error:
        print(f"grpo-jax: the run was stopped: {error}", file=sys.stderr)
        return STOPPED
    except BrokenPipeError:  # a reader such as `head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("GRPO_JAX_TRACEBACK", "0") not in ("", "0"):
            traceback.print_exc()
        else:
            print(f"grpo-jax: error: {error}", file=sys.stderr)
        return USER_ERROR


def _command(name: str) -> Callable[[list[str]], int]:
    commands = {
        "train": run_train,
        "eval": run_eval,
        "sample": run_sample,
        "export": run_export,
        "presets": run_presets,
    }
    if name not in commands:
        near = difflib.get_close_matches(name, commands, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "see grpo-jax --help"
        raise ValueError(f"no command {name!r} (there are {', '.join(commands)}); {hint}")
    return commands[name]


def run_train(arguments: list[str]) -> int:
    """``grpo-jax train``: 130 where the run was interrupted and saved, else 0."""
    path, rest = take_experiment(arguments)
    experiment = None if path is None else load_experiment(path)
    options = parse_train(
        experiment.config if experiment else Config(), rest, prog=f"grpo-jax train {path or 'EXPERIMENT.py'}"
    )
    if experiment is None:
        raise ValueError(
            "train needs an experiment file, a .py file with get_config(): "
            "grpo-jax train experiments/quickstart.py"
        )
    config = options.config
    if options.workdir is None and not options.dry_run and "GRPO_JAX_COORDINATOR" in os.environ:
        raise ValueError("--workdir must be given where several processes train: all of them share one folder")
    workdir = options.workdir or Path("runs") / f"{config.experiment}-{time.strftime('%Y%m%d-%H%M%S')}"

    from grpo_jax.mesh import initialize_distributed

    initialize_distributed()
    if options.preset is not None:
        announce_preset(options.preset)
    task = experiment.make_task(config)
    if options.dry_run:
        run_dry(config, task)
        return 0
    from grpo_jax.train.loop import train

    summary = train(config, workdir=workdir, fresh=options.fresh, task=task, experiment_file=experiment.path)
    return INTERRUPTED if summary.interrupted else 0


def run_eval(arguments: list[str]) -> int:
    """``grpo-jax eval``: prints the report, and writes it where --json says."""
    options = parse(EvalOptions, arguments, prog="grpo-jax eval")
    policy = _load(options.run, options.checkpoint)
    settings = policy.config.eval
    from grpo_jax.evaluate import evaluate
    from grpo_jax.train.run_folder import write_beside

    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    problems = policy.task.heldout[: options.num_problems]
    with Console() as console, console.progress("evaluation", len(problems)) as show:
        report = evaluate(
            policy.generate,
            policy.task,
            problems,
            samples=settings.samples if options.samples is None else options.samples,
            temperature=settings.temperature if options.temperature is None else options.temperature,
            seed=options.seed,
            batch_size=settings.batch_size,
            on_progress=show,
        )
    print_report(report, title=f"{options.run}, checkpoint {options.checkpoint}")
    if options.json is not None:
        write_beside(options.json, json.dumps(report.to_json(), indent=2) + "\n")
    return 0


def run_sample(arguments: list[str]) -> int:
    """``grpo-jax sample``: prints completions of one prompt, or of each line of standard input."""
    options = parse(SampleOptions, arguments, prog="grpo-jax sample")
    policy = _load(options.run, options.checkpoint)
    prompts = _typed_lines(policy) if options.prompt is None else iter([options.prompt])
    for index, prompt in enumerate(prompts):
        try:
            (completions,) = policy.generate(
                [_as_example(prompt, policy)],
                num_samples=options.samples,
                temperature=options.temperature,
                seed=options.seed + index,
                top_p=options.top_p,
                top_k=options.top_k,
                min_p=options.min_p,
            )
        except ValueError as error:
            if options.prompt is not None:
                raise
            print(f"cannot take this prompt: {error}", file=sys.stderr)
            continue
        for number, completion in enumerate(completions, start=1):
            ending = "finished" if completion.finished else "cut off"
            print(f"--- {number}/{len(completions)}: {completion.num_tokens} tokens, {ending}")
            print("\n".join(printable(line) for line in completion.text.split("\n")))
    return 0


def run_export(arguments: list[str]) -> int:
    """``grpo-jax export``: the policy as a folder that other programs load."""
    options = parse(ExportOptions, arguments, prog="grpo-jax export")
    policy = _load(options.run, options.checkpoint)
    from grpo_jax.models.hf import save_hf

    save_hf(options.folder, policy.model.config, policy.params, policy.tokenizer)
    print(f"wrote {options.folder}")
    return 0


def _load(run: Path, checkpoint: str) -> Policy:
    """The run's policy; a task that the run's experiment file defines is made anew from the run's copy."""
    from grpo_jax.train.policy import load_policy, read_config
    from grpo_jax.train.run_folder import EXPERIMENT_FILE

    config = read_config(run)
    task = None
    if config.task.name == "custom":
        # The run may be named by its checkpoints' folder or by one checkpoint.
        folders = (run, *run.resolve().parents[:2])
        copies = [folder / EXPERIMENT_FILE for folder in folders if (folder / EXPERIMENT_FILE).is_file()]
        task = load_experiment((copies or [run / EXPERIMENT_FILE])[0]).make_task(config)
    return load_policy(run, checkpoint=checkpoint, task=task)


def _some_prompt(policy: Policy) -> str | list[dict[str, str]]:
    """A prompt of the policy's task, to see how it writes them."""
    return next(iter(policy.task.heldout or policy.task.train)).prompt


def _as_example(text: str, policy: Policy) -> Example:
    """What was typed, as the task's kind of prompt: plain text, or a turn after its system message."""
    from grpo_jax.tasks.base import Example

    model = _some_prompt(policy)
    if isinstance(model, str):
        return Example(prompt=text, answer="")
    system = [message for message in model[:1] if message["role"] == "system"]
    return Example(prompt=[*system, {"role": "user", "content": text}], answer="")


def _typed_lines(policy: Policy) -> Iterator[str]:
    """Prompts from standard input, one a line; empty lines are passed over."""
    asks = sys.stdin.isatty()
    if asks:
        prompt = _some_prompt(policy)
        example = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        print(f"One prompt a line, as the task has them (such as {printable(example, limit=200)}); Ctrl-D ends.")
    while True:
        try:
            line = input("> " if asks else "")
        except EOFError:
            return
        if line.strip():
            yield line


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show what the package warns its user of without the place in the code."""
    original = warnings.formatwarning

    def plain(message: Any, category: type[Warning], *place: Any, **line: Any) -> str:
        if category is UserWarning:
            return f"grpo-jax: warning: {message}\n"
        return original(message, category, *place, **line)

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = original
