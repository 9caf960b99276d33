"""Where a run stands: begun, saved, restored, and measured on held-out problems."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from grpo_jax.checkpoint import Checkpointer
from grpo_jax.config import config_to_dict
from grpo_jax.console import Console
from grpo_jax.evaluate import EvalReport, evaluate
from grpo_jax.mesh import GROUP_AXES, PROMPT_AXES, partition_spec
from grpo_jax.tasks.base import Example
from grpo_jax.train.run_folder import Interruption
from grpo_jax.train.session import Session
from grpo_jax.train.sft import warm_start
from grpo_jax.types import Rollout, TrainState


@dataclass(frozen=True)
class RolloutAhead:
    """The next step's rollout, which the device has or works on."""

    examples: list[Example]
    rollout: Rollout
    position: dict[str, Any]
    """Of the stream of prompts, before the examples."""


@dataclass
class Progress:
    """Where a run stands; all that a checkpoint holds beside the configuration."""

    state: TrainState
    key: jax.Array
    done: int = 0
    """Steps that are finished."""
    before: dict[str, Any] = field(default_factory=dict)
    """The evaluation before the first step."""
    after: dict[str, Any] = field(default_factory=dict)
    """The latest evaluation."""
    after_step: int = 0
    """The step that it was made at."""
    ahead: RolloutAhead | None = None
    """With ``rollout.steps_ahead``; there is none before the first step."""

    def step_key(self, step: int) -> jax.Array:
        """The random key of a step's rollout."""
        return jax.random.fold_in(self.key, step)


def abstract_rollout(session: Session) -> Rollout:
    """Shapes, dtypes and shardings of a batch's rollout, to restore a checkpoint into."""
    sizes = session.config.rollout
    P, G, S, T = sizes.num_prompts, sizes.group_size, sizes.max_prompt_length, sizes.max_completion_length

    def array(axes: tuple[str, ...], shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(session.mesh, partition_spec(axes)))

    return Rollout(
        prompt_PS=array(PROMPT_AXES, (P, S), jnp.int32),
        prompt_mask_PS=array(PROMPT_AXES, (P, S), jnp.bool),
        completion_PGT=array(GROUP_AXES, (P, G, T), jnp.int32),
        completion_mask_PGT=array(GROUP_AXES, (P, G, T), jnp.bool),
        sampler_logps_PGT=array(GROUP_AXES, (P, G, T), jnp.float32),
        finished_PG=array(GROUP_AXES, (P, G), jnp.bool),
    )


def begin(session: Session, console: Console, interruption: Interruption) -> tuple[Progress, EvalReport]:
    """The supervised start, the state that follows from it, and the first evaluation."""
    config, policy = session.config, session.policy
    params = policy.params
    if config.warm_start.steps > 0:
        console.stage("supervised start")
        with console.progress("warm start", config.warm_start.steps) as show:

            def on_step(done: int, loss: float) -> None:
                show(done, loss=loss)
                if interruption.agreed():
                    raise KeyboardInterrupt("stopped in the supervised start: there is no checkpoint yet")

            params = warm_start(
                policy.model, params, policy.tokenizer, policy.task.train, config, policy.mesh, on_step
            )
    progress = Progress(state=session.initial_state(params), key=jax.random.key(config.seed))
    heldout = measure(progress, session, console, "held-out problems before GRPO")
    progress.before = progress.after
    return progress, heldout


def resume(session: Session, checkpoints: Checkpointer) -> Progress:
    """Everything as the last checkpoint has it."""
    abstract = session.abstract_state()
    if session.config.rollout.steps_ahead > 0 and checkpoints.latest_step() != 0:
        abstract = dataclasses.replace(abstract, ahead=abstract_rollout(session))
    for x in jax.tree.leaves(session.policy.params):  # make room: the checkpoint's take their place
        x.delete()
    state, host = checkpoints.restore(abstract)
    ahead = None
    if state.ahead is not None:
        session.prompts.restore(host["prompts_ahead"])
        ahead = RolloutAhead(next(session.prompts), state.ahead, host["prompts_ahead"])
    session.prompts.restore(host["prompts"])
    return Progress(
        state=dataclasses.replace(state, ahead=None),
        key=jax.random.wrap_key_data(jnp.array(host["key"], jnp.uint32)),
        done=int(state.step),
        before=host["before"],
        after=host["after"],
        after_step=host["after_step"],
        ahead=ahead,
    )


def save(progress: Progress, session: Session, checkpoints: Checkpointer, heldout: EvalReport | None) -> None:
    """Write a checkpoint: the state, and the host's values that the next step depends on."""
    ahead = progress.ahead
    checkpoints.save(
        progress.done,
        dataclasses.replace(progress.state, ahead=None if ahead is None else ahead.rollout),
        host={
            "prompts": session.prompts.position(),
            "prompts_ahead": None if ahead is None else ahead.position,
            "key": np.asarray(jax.random.key_data(progress.key)).tolist(),
            "before": progress.before,
            "after": progress.after,
            "after_step": progress.after_step,
        },
        config=config_to_dict(session.config),
        metric=None if heldout is None else heldout.success_rate.value,
    )


def measure(progress: Progress, session: Session, console: Console, label: str) -> EvalReport:
    """Evaluate the policy on held-out problems, greedily and with samples."""
    settings = session.config.eval
    policy = dataclasses.replace(session.policy, params=progress.state.params)
    problems = policy.task.heldout[: settings.num_problems]
    with console.progress(label, len(problems)) as show:
        report = evaluate(
            policy.generate,
            policy.task,
            problems,
            samples=settings.samples,
            temperature=settings.temperature,
            seed=session.config.seed,
            batch_size=settings.batch_size,
            on_progress=show,
        )
    console.message(
        f"{label}: {100 * report.success_rate.value:.1f} % of samples right at temperature "
        f"{settings.temperature:g}, {100 * report.greedy_accuracy.value:.1f} % greedy"
    )
    progress.after, progress.after_step = report.to_json(), progress.done
    return report
