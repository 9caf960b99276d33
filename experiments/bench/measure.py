"""The stages of a step with random weights, as a run compiles them, and the ways to time them.

Completions have exactly T tokens: the end-of-sequence id is none that can be drawn.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax.allocator import keep_freed_memory
from grpo_jax.config import Config, MeshConfig, ModelConfig, ObjectiveConfig, RolloutConfig, TrainConfig
from grpo_jax.mesh import PROMPT_AXES, make_mesh, place_params, shardings, to_mesh
from grpo_jax.models.config import DecoderConfig
from grpo_jax.models.decoder import Decoder, init_params, logical_axes
from grpo_jax.models.flops import BatchSizes
from grpo_jax.optim.chain import make_optimizer, opt_state_shardings
from grpo_jax.rollout.engine import generate
from grpo_jax.rollout.state import EngineConfig
from grpo_jax.train.dry_run import Program, compile_program
from grpo_jax.train.report import CompileCounter
from grpo_jax.train.step import TrainStep
from grpo_jax.types import Rollout, TrainBatch, TrainState

NEVER = -1


def repeat_seconds(call: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of each call after a first one."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A compiled stage and how long it took."""

    program: Program
    seconds: float
    """Median over the repeats."""
    compilations: int
    """Programs compiled by compiling the stage and by all its calls; 1 where nothing is compiled again."""


def time_stage(function: Any, call: Callable[[Any], Any], arguments: tuple[Any, ...], repeats: int) -> Timing:
    """Compile ``function`` for ``arguments``, then time ``call(compiled)``."""
    with CompileCounter() as counter:
        program = compile_program(function, *arguments)
        seconds = repeat_seconds(lambda: call(program.compiled), repeats) if repeats else [0.0]
    return Timing(program=program, seconds=statistics.median(seconds), compilations=counter.count)


class Stages:
    """Rollout, log-probabilities and update of one model and batch, on the mesh of all devices.

    Args:
        model: shape and precision; weights are random.
        sizes: of the batch.
        logps_chunk: tokens whose logits are held at a time.
    """

    def __init__(self, model: DecoderConfig, sizes: BatchSizes, *, logps_chunk: int = 2048) -> None:
        self.sizes = sizes
        self.config = bench_config(model, sizes, logps_chunk)
        keep_freed_memory()
        self.mesh = make_mesh(MeshConfig())
        self.model = Decoder(model)
        optimizer = make_optimizer(self.config.optimizer, self.config.train.steps)
        self.step = TrainStep(self.model, optimizer, self.config, model.vocab_size)
        axes = logical_axes(model)
        self.params = place_params(init_params(model, jax.random.key(0)), axes, self.mesh)
        whole = NamedSharding(self.mesh, PartitionSpec())
        placed = shardings(axes, self.mesh)
        state_shardings: Any = TrainState(
            params=placed,
            ref_params=None,
            opt_state=opt_state_shardings(optimizer, self.params, placed, whole),
            step=whole,  # type: ignore[arg-type]
        )
        self.state_shardings = state_shardings
        self._update = jax.jit(self.step.train_step, donate_argnums=0, out_shardings=(state_shardings, whole))
        self._generate = jax.jit(generate, static_argnames=("model", "config"))
        rng = np.random.default_rng(0)
        prompt_PS = rng.integers(0, model.vocab_size, (sizes.prompts, sizes.prompt), np.int32)
        self.prompt_PS = to_mesh(prompt_PS, PROMPT_AXES, self.mesh)
        self.prompt_mask_PS = to_mesh(np.ones(prompt_PS.shape, bool), PROMPT_AXES, self.mesh)

    def time_rollout(self, repeats: int) -> tuple[Timing, Rollout | None]:
        """Also a rollout, where there are repeats."""
        config = EngineConfig(
            group_size=self.sizes.group,
            max_completion_length=self.sizes.completion,
            vocab_size=self.model.vocab_size,
            eos_ids=(NEVER,),
            pad_id=0,
            num_shards=self.mesh.shape["data"] * self.mesh.shape["fsdp"],
        )
        arrays = (self.params, self.prompt_PS, self.prompt_mask_PS, jax.random.key(1))
        rollout: list[Rollout] = []

        def call(compiled: Any) -> Rollout:
            rollout[:] = [compiled(*arrays, None)]
            return rollout[0]

        with jax.set_mesh(self.mesh):
            timing = time_stage(self._generate, call, (self.model, *arrays, None, config), repeats)
        if not rollout:
            return timing, None
        assert rollout[0].completion_mask_PGT.all(), "a completion ended before its T tokens"
        return timing, rollout[0]

    def time_score(self, repeats: int) -> Timing:
        """Log-probabilities of a batch."""
        score = jax.jit(lambda params, batch: self.step.score(params, batch)[0])
        arguments = (self.params, self.batch())
        with jax.set_mesh(self.mesh):
            return time_stage(score, lambda compiled: compiled(*arguments), arguments, repeats)

    def time_update(self, repeats: int) -> Timing:
        """Gradient and optimizer; the parameters are donated, and this object is of no use after it."""

        def build(params: Any) -> TrainState:
            opt_state = self.step.optimizer.init(params)
            return TrainState(params=params, ref_params=None, opt_state=opt_state, step=jnp.int32(0))

        with jax.set_mesh(self.mesh):
            state = jax.jit(build, out_shardings=self.state_shardings, donate_argnums=0)(self.params)
            held = [state]
            batch = self.batch()

            def call(compiled: Any) -> Any:
                held[0], metrics = compiled(held[0], batch)
                return held[0], metrics

            return time_stage(self._update, call, (state, batch), repeats)

    def batch(self) -> TrainBatch:
        """A batch of random completions and advantages; every token counts."""
        sizes, rng = self.sizes, np.random.default_rng(1)
        shape = (sizes.prompts, sizes.group, sizes.completion)
        place = functools.partial(to_mesh, axes=PROMPT_AXES, mesh=self.mesh)
        return TrainBatch(
            prompt_PS=self.prompt_PS,
            prompt_mask_PS=self.prompt_mask_PS,
            completion_PGT=place(rng.integers(0, self.model.vocab_size, shape, np.int32)),
            loss_mask_PGT=place(np.ones(shape, bool)),
            sampler_logps_PGT=place(np.full(shape, -np.log(self.model.vocab_size), np.float32)),
            advantages_PG=place(rng.standard_normal(shape[:2], np.float32)),
            old_logps_PGT=None,
            ref_logps_PGT=None,
        )


def bench_config(model: DecoderConfig, sizes: BatchSizes, logps_chunk: int) -> Config:
    """AdamW, one update a batch, no reference."""
    return Config(
        model=ModelConfig(compute_dtype=model.compute_dtype, remat=model.remat),  # type: ignore[arg-type]
        rollout=RolloutConfig(
            num_prompts=sizes.prompts,
            group_size=sizes.group,
            max_prompt_length=sizes.prompt,
            max_completion_length=sizes.completion,
        ),
        objective=ObjectiveConfig(beta=0.0),
        train=TrainConfig(logps_chunk=logps_chunk),
    )


def with_changes(model: DecoderConfig, **changes: Any) -> DecoderConfig:
    """``model`` with the fields that are not None."""
    return dataclasses.replace(model, **{name: value for name, value in changes.items() if value is not None})


def peak_rss() -> int:
    """Most memory that this process has held so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def machine() -> dict[str, Any]:
    """Where the numbers come from."""
    return {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    }


def write_json(file: Path | None, content: Any) -> None:
    """Write a result, where a file is named."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=1) + "\n")
