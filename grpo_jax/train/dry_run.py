"""A run without running: what it would compile, in how much memory, and how much arithmetic a step needs.

The session's own methods are called, in the order of the loop; in the place of ``jax.jit`` stands something that
compiles for the shapes it is called with and returns shapes. Nothing is trained, and nothing is written.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from grpo_jax.config import Config
from grpo_jax.mesh import PROMPT_AXES, slot_layout, to_mesh
from grpo_jax.models.flops import BatchSizes, forward_flops, update_flops
from grpo_jax.rewards import RewardResult
from grpo_jax.rollout.sampler import encode_prompt
from grpo_jax.rollout.sampling import SamplingParams
from grpo_jax.rollout.state import cache_capacities
from grpo_jax.tasks.base import Task
from grpo_jax.train.session import Session, build_policy
from grpo_jax.types import TrainState


@dataclass(frozen=True, kw_only=True)
class Program:
    """A function compiled ahead of time; all bytes are those on each device."""

    compiled: jax.stages.Compiled
    seconds: float
    """To trace and compile it."""
    arguments: int
    temporaries: int
    output: int
    donated: int
    """Part of the output that lies where arguments did."""

    @property
    def added(self) -> int:
        """What running it takes beside its arguments."""
        return self.temporaries + self.output - self.donated


def compile_program(function: Any, *arguments: Any, **keywords: Any) -> Program:
    """Compile a jitted function for its arguments, which may be shapes alone."""
    start = time.perf_counter()
    compiled = function.lower(*arguments, **keywords).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    return Program(
        compiled=compiled,
        seconds=seconds,
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        output=memory.output_size_in_bytes,
        donated=memory.alias_size_in_bytes,
    )


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a program is compiled for."""

    name: str
    sizes: BatchSizes
    slots: tuple[int, int] | None = None
    """Rows and slots a row, where it decodes."""
    lengths: str = ""
    """Which lengths or numbers of rows the program chooses from, where it has several."""
    flops: int = 0
    """Needed by one call, on all devices together; see :mod:`grpo_jax.models.flops`."""


@dataclass(kw_only=True)
class Stage:
    """A program and all that it is called for."""

    program: Program
    inputs: int
    """Bytes of its arguments on each device, without the state's."""
    works: list[Work] = field(default_factory=list)
    """One a call."""


class AheadOfTime:
    """Stands in for ``jax.jit``: what it makes compiles for the shapes of its arguments, and returns shapes."""

    def __init__(self, on_compiled: Callable[[int], None] | None = None) -> None:
        self.stages: list[Stage] = []
        self.work: Work | None = None
        """What the calls that follow are for."""
        self.state_leaves: set[int] = set()
        self._on_compiled = on_compiled

    def jit(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """As ``jax.jit``."""
        jitted = jax.jit(function, **options)
        stages: dict[Hashable, Stage] = {}

        def call(*arguments: Any, **keywords: Any) -> Any:
            assert self.work is not None, "name the work first"
            leaves, structure = jax.tree.flatten((arguments, keywords))
            key = (structure, tuple((x.shape, x.dtype) if _is_array(x) else x for x in leaves))
            if key not in stages:
                others = [x for x in leaves if _is_array(x) and id(x) not in self.state_leaves]
                stages[key] = Stage(
                    program=compile_program(jitted, *arguments, **keywords), inputs=device_bytes(others)
                )
                self.stages.append(stages[key])
                if self._on_compiled is not None:
                    self._on_compiled(len(self.stages))
            stages[key].works.append(self.work)
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
                stages[key].program.compiled.out_info,
            )

        return call


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a run would compile and hold; all bytes are those on each device."""

    stages: list[Stage]
    num_params: int
    params: int
    optimizer: int
    reference: int
    num_devices: int
    device_kind: str
    capacity: int | None
    """Memory of a device, where it is known."""

    def peak(self, stage: Stage) -> int:
        """Memory while a stage runs: the whole state, the stage's other arguments, and what it adds."""
        return self.params + self.optimizer + self.reference + stage.inputs + stage.program.added


def dry_run(
    config: Config, *, task: Task | None = None, on_compiled: Callable[[int], None] | None = None
) -> DryRun:
    """Build a run and compile its stages, without training.

    Args:
        config: the run's configuration.
        task: replaces the task that the configuration names.
        on_compiled: called with the number of programs that are ready.

    Raises:
        ValueError: the configuration fits neither the devices, the model nor the task.
    """
    ahead = AheadOfTime(on_compiled)
    session = Session(build_policy(config, task, jit=ahead.jit), jit=ahead.jit)
    state = session.abstract_state()
    ahead.state_leaves = {id(x) for x in jax.tree.leaves(state)}
    compile_step(session, state, ahead)
    compile_evaluation(session, state, ahead)
    device = jax.local_devices()[0]
    return DryRun(
        stages=ahead.stages,
        num_params=sum(x.size for x in jax.tree.leaves(state.params)),
        params=device_bytes(state.params),
        optimizer=device_bytes(state.opt_state),
        reference=device_bytes(state.ref_params),
        num_devices=jax.device_count(),
        device_kind=device.device_kind,
        capacity=(device.memory_stats() or {}).get("bytes_limit"),
    )


def compile_step(session: Session, state: TrainState, ahead: AheadOfTime) -> None:
    """The stages of a step, one from the other's outputs."""
    config, model = session.config, session.policy.model.config
    settings, train = config.rollout, config.train
    sizes = BatchSizes(
        prompts=settings.num_prompts,
        group=settings.group_size,
        prompt=settings.max_prompt_length,
        completion=settings.max_completion_length,
    )
    N = settings.num_parts
    part = dataclasses.replace(sizes, prompts=sizes.prompts // N)
    slots = slot_layout(
        part.prompts,
        part.group,
        settings.num_slots,
        session.policy.sampler.data_shards,
        session.mesh.shape["group"],
    )
    forward = forward_flops(model, sizes)
    examples, key = next(session.prompts), jax.random.key(config.seed)

    caches = _choice("cache", cache_capacities(sizes.completion))
    with jax.set_mesh(session.mesh):
        rows = _choice("rows", session.step.row_counts)
    name = "rollout" if N == 1 else f"rollout, each of {N} parts"
    ahead.work = Work(name=name, sizes=part, slots=slots, lengths=caches, flops=forward_flops(model, part))
    rollout = session.roll_out(state.params, examples[::N], key)
    if N > 1:
        ahead.work = Work(name="joining parts", sizes=sizes)
        with jax.set_mesh(session.mesh):
            rollout = session.join_rollouts([rollout] * N)
    if settings.extra_rollouts > 0:
        ahead.work = Work(name="replacing groups", sizes=sizes)
        source_P = to_mesh(np.zeros(len(examples), np.int32), PROMPT_AXES, session.mesh)
        with jax.set_mesh(session.mesh):
            rollout = session.take_groups(rollout, rollout, source_P)
    ahead.work = Work(name="log-probabilities", sizes=sizes, lengths=rows, flops=forward)
    old_PGT, ref_PGT = session.score(rollout, state)
    ahead.work = Work(name="batch", sizes=sizes)
    shape = (len(examples), sizes.group)
    rewards = RewardResult(np.zeros((*shape, len(session.reward_names)), np.float32), failures={})
    batch, *_ = session.make_batch(rollout, rewards, np.zeros(shape, bool), old_PGT, ref_PGT, key)
    selection = forward if config.objective.selects_tokens else 0
    ahead.work = Work(
        name="update",
        sizes=sizes,
        lengths=rows,
        flops=train.updates_per_batch * (update_flops(model, sizes) + selection),
    )
    session.update(state, batch)


def compile_evaluation(session: Session, state: TrainState, ahead: AheadOfTime) -> None:
    """The rollouts of the evaluations on held-out problems; the last batch of problems may be smaller."""
    policy, settings, rollout = session.policy, session.config.eval, session.config.rollout
    problems = policy.task.heldout[: settings.num_problems]
    greedy = ("evaluation, greedy", 1, SamplingParams(temperature=0.0))
    samples = ("evaluation, samples", settings.samples, SamplingParams(temperature=settings.temperature))
    starts = range(0, len(problems), settings.batch_size)
    for count in dict.fromkeys(min(settings.batch_size, len(problems) - start) for start in starts):
        rows = policy.sampler.batch_rows(count, settings.batch_size)
        for name, group, sampling in (greedy, samples):
            sizes = BatchSizes(
                prompts=rows,
                group=group,
                prompt=rollout.max_prompt_length,
                completion=rollout.max_completion_length,
            )
            flops = forward_flops(policy.model.config, sizes)
            caches = _choice("cache", cache_capacities(sizes.completion))
            ahead.work = Work(name=name, sizes=sizes, slots=(rows, group), lengths=caches, flops=flops)
            prompt = encode_prompt(policy.tokenizer, problems[0])
            policy.sampler.rollout(
                state.params, [prompt] * rows, jax.random.key(0), group_size=group, sampling=sampling
            )


def _choice(name: str, values: tuple[int, ...]) -> str:
    return f"{name} {', '.join(map(str, values))}" if len(values) > 1 else ""


def device_bytes(tree: Any) -> int:
    """Bytes of a tree's arrays (or shapes) on each device."""
    return sum(_shard_bytes(x) for x in jax.tree.leaves(tree))


def _shard_bytes(x: Any) -> int:
    shape = x.sharding.shard_shape(x.shape) if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) else x.shape
    return int(np.prod(shape, dtype=np.int64)) * x.dtype.itemsize


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, jax.ShapeDtypeStruct, np.ndarray))
