"""A run, from top to bottom: set up, restore, roll out, reward, advantages, update, log, evaluate, save."""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from grpo_jax.checkpoint import Checkpointer
from grpo_jax.config import Config
from grpo_jax.console import Console
from grpo_jax.metrics import RunLog
from grpo_jax.tasks.base import Task
from grpo_jax.train.overlap import SampleSource
from grpo_jax.train.policy import CHECKPOINT_FOLDER
from grpo_jax.train.progress import Progress, begin, measure, resume, save
from grpo_jax.train.report import CompileCounter, StageClock, StepReport
from grpo_jax.train.run_folder import Interruption, check_run_folder, open_run_folder
from grpo_jax.train.sample import replace_groups
from grpo_jax.train.session import Session, build_policy


@dataclass(frozen=True)
class TrainSummary:
    """How a run ended; evaluations are as ``grpo-jax eval --json`` writes them."""

    workdir: Path
    step: int
    interrupted: bool
    before: dict[str, Any]
    after: dict[str, Any]


def train(
    config: Config,
    *,
    workdir: Path,
    fresh: bool = False,
    task: Task | None = None,
    experiment_file: Path | None = None,
) -> TrainSummary:
    """Train a policy, or go on with it where ``workdir`` holds a checkpoint of this run.

    Args:
        config: the run's configuration.
        workdir: the run's folder.
        fresh: start over, and set an earlier run in ``workdir`` aside.
        task: replaces the task that the configuration names.
        experiment_file: remembered in the run's folder.

    Raises:
        ValueError: the configuration fits neither the run in ``workdir``, the devices, the model nor the task.
        CheckpointError: a checkpoint could not be written or read.
        FloatingPointError: gradients stayed NaN or infinite; the last checkpoint is intact.
    """
    is_first = jax.process_index() == 0
    with (
        Console(every=config.log.every, enabled=is_first) as console,
        Interruption() as interruption,
        CompileCounter() as compiled,
    ):
        # ------------------------------------------------------------------------------------ set up
        console.stage(f"{config.experiment}: set up")
        moved = check_run_folder(workdir, config, fresh=fresh)
        session = Session(build_policy(config, task))
        # Only now: a command that is refused leaves the folder as it was.
        open_run_folder(workdir, config, moved=moved, experiment_file=experiment_file)
        if moved is not None:
            console.message(f"the earlier run is now {moved}")
        announce(session, workdir, console)
        checkpoints = Checkpointer(
            workdir / CHECKPOINT_FOLDER, keep=config.checkpoint.keep, keep_best=config.checkpoint.keep_best
        )
        with contextlib.closing(checkpoints):
            # -------------------------------------------------------------------- restore, or start
            new = checkpoints.latest_step() is None
            if new:
                progress, heldout = begin(session, console, interruption)
                save(progress, session, checkpoints, heldout)
            else:
                progress = resume(session, checkpoints)
                console.message(f"going on from the checkpoint of step {progress.done}")
                if progress.done >= config.train.steps and progress.after_step != progress.done:
                    measure(progress, session, console, f"step {progress.done}: held-out")
            # ------------------------------------------------------------------------------- train
            with RunLog(workdir, resume_step=None if new else progress.done, enabled=is_first) as log:
                run_steps(progress, session, checkpoints, log, console, interruption, compiled)
        interrupted = progress.done < config.train.steps
        conclude(progress, config, workdir, console)
    return TrainSummary(workdir, progress.done, interrupted, progress.before, progress.after)


def run_steps(
    progress: Progress,
    session: Session,
    checkpoints: Checkpointer,
    log: RunLog,
    console: Console,
    interruption: Interruption,
    compiled: CompileCounter,
) -> None:
    """The steps that are left; the device has its next work before the last update's metrics are read."""
    config, clock = session.config, StageClock()
    pending: StepReport | None = None
    if progress.done < config.train.steps:
        console.stage("GRPO")
        console.start(config.train.steps, progress.done)
    with SampleSource(session, progress, clock) as samples:
        while progress.done < config.train.steps:
            step = progress.done + 1
            key = progress.step_key(step)
            # ------------------------------------------------------------------------------ roll out
            samples.begin()
            if pending is not None:
                pending.wait(clock, config.optimizer.max_nonfinite)
                pending.write(log, console, config, compiled.count, heldout=None)
            # -------------------------------------------------------------------------------- reward
            sample = samples.finish()
            sample, extra_rollouts = replace_groups(session, sample, samples.draw, key)
            # ---------------------------------------------------------------------------- advantages
            reward_failures = session.count_failures(sample.rewards)
            old_PGT, ref_PGT = session.score(sample.rollout, progress.state)
            batch, rewards_PG, batch_metrics = session.make_batch(
                sample.rollout, sample.rewards, sample.correct_PG, old_PGT, ref_PGT, key
            )
            samples.seconds["Score"] += clock.lap()
            # -------------------------------------------------------------------------------- update
            progress.state, step_metrics = session.update(progress.state, batch)
            progress.done = step
            # ----------------------------------------------------------------------------------- log
            pending = StepReport(
                step=step,
                sample=sample,
                reward_failures=reward_failures,
                rewards_PG=session.to_host(rewards_PG),
                advantages_PG=session.to_host(batch.advantages_PG),
                reward_names=session.reward_names,
                batch_metrics=batch_metrics | {"Training/ExtraRollouts": extra_rollouts},
                step_metrics=step_metrics,
                learning_rate=session.learning_rate,
                epoch=session.prompts.epoch,
                seconds=samples.seconds,
            )
            samples.seconds["Update"] += clock.lap()
            # ------------------------------------------------------------------------ evaluate, save
            last = step == config.train.steps
            stop = interruption.agreed()
            evaluates = last or (config.eval.every > 0 and step % config.eval.every == 0)
            if evaluates or stop or step % config.checkpoint.every == 0:
                pending.wait(clock, config.optimizer.max_nonfinite)
                heldout = measure(progress, session, console, f"step {step}: held-out") if evaluates else None
                pending.write(log, console, config, compiled.count, heldout)
                save(progress, session, checkpoints, heldout)
                pending = None
                clock.lap()
            if stop:
                break
    console.stop()


def announce(session: Session, workdir: Path, console: Console) -> None:
    """What is about to run, and what its user should know of it."""
    config, policy = session.config, session.policy
    count = sum(x.size for x in jax.tree.leaves(policy.params))
    mesh = " x ".join(f"{name} {size}" for name, size in policy.mesh.shape.items() if size > 1)
    console.message(
        f"model: {count / 1e6:.2f} M parameters | devices: {jax.device_count()} {jax.default_backend()}"
        f"{' (' + mesh + ')' if mesh else ''} | run: {workdir}"
    )
    console.message(
        f"task {policy.task.name}: {len(policy.task.train)} training and {len(policy.task.heldout)} held-out "
        f"problems | a batch: {config.rollout.num_prompts} prompts x {config.rollout.group_size} completions"
    )
    if policy.dropped_prompts:
        console.warning(
            f"{policy.dropped_prompts} prompts are longer than rollout.max_prompt_length "
            f"({config.rollout.max_prompt_length}) and were left out"
        )
    if config.rollout.off_policy:
        reasons = []
        if config.rollout.truncates_distribution:
            reasons.append("top-p, top-k or min-p truncate the distribution that is sampled from")
        if config.rollout.steps_ahead > 0:
            reasons.append("rollout.steps_ahead=1 samples with the policy from before the last update")
        corrected = "NOT corrected by" if session.step.importance == "none" else "corrected by"
        console.warning(
            f"{' and '.join(reasons)}: samples are off-policy, {corrected} importance weights "
            f"(objective.importance={config.objective.importance})"
        )


def conclude(progress: Progress, config: Config, workdir: Path, console: Console) -> None:
    """Accuracy before and after, where the run lies, and what one would type next."""
    folder = shlex.quote(str(workdir))
    if progress.done < config.train.steps:
        console.message(
            f"stopped after step {progress.done} of {config.train.steps}; everything is saved. "
            f"The same command with --workdir {folder} goes on."
        )
        return
    names = {"success_rate": "success rate (samples)", "greedy_accuracy": "greedy accuracy"}
    console.summary(
        {label: progress.before[name] for name, label in names.items()},
        {label: progress.after[name] for name, label in names.items()},
        workdir,
        [
            f"grpo-jax eval {folder}",
            f"grpo-jax sample {folder}",
            f"tensorboard --logdir {folder}",
        ],
    )
    extends = f"the same command with --workdir {folder} and a larger --train.steps extends it"
    if config.optimizer.schedule != "constant":
        extends = f"its {config.optimizer.schedule} schedule has ended, so a longer run needs another --workdir"
    console.message(f"The run is finished; {extends}.")
