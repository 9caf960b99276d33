"""Prompts in, completions out: padding and placing token ids around the compiled engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from grpo_jax.mesh import GROUP_AXES, PROMPT_AXES, host_rows, to_every_host, to_host, to_mesh
from grpo_jax.rollout.engine import generate
from grpo_jax.rollout.sampling import SamplingParams
from grpo_jax.rollout.state import EngineConfig
from grpo_jax.rollout.stop import stop_table
from grpo_jax.tasks.base import Completion, Example, plain_prompt
from grpo_jax.tokenizer import Tokenizer, token_byte_table
from grpo_jax.types import Array, Model, Params, Rollout


@dataclass(frozen=True)
class HostRollout:
    """This host's part of a rollout, as Python and NumPy values."""

    token_ids: list[list[list[int]]]
    """``[P][G]`` lists of ids, without padding, the end-of-sequence id included."""
    texts: list[list[str]]
    """``[P][G]`` decoded completions; a stop string is left in, special tokens are not."""
    lengths_PG: np.ndarray
    finished_PG: np.ndarray

    def completions(self) -> list[list[Completion]]:
        """The completions one by one, for evaluation."""
        return [
            [
                Completion(text=text, num_tokens=int(length), finished=bool(finished))
                for text, length, finished in zip(*group, strict=True)
            ]
            for group in zip(self.texts, self.lengths_PG, self.finished_PG, strict=True)
        ]


class Sampler:
    """Samples completions of prompts with the compiled engine; one compilation a setting, reused."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        mesh: Mesh,
        *,
        max_prompt_length: int,
        max_completion_length: int,
        stop: Sequence[str] = (),
        jit: Callable[..., Any] = jax.jit,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.mesh = mesh
        self.max_prompt_length = max_prompt_length
        self.max_completion_length = max_completion_length
        table = stop_table(token_byte_table(tokenizer), stop)
        self.stop_table = None if table is None else to_mesh(table, (None, None), mesh)
        self.data_shards = mesh.shape["data"] * mesh.shape["fsdp"]
        self.compiled = jit(generate, static_argnames=("model", "config"))

    def rollout(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        key: Array,
        *,
        group_size: int,
        sampling: SamplingParams,
        num_slots: int | None = None,
        prompt_number_P: np.ndarray | None = None,
    ) -> Rollout:
        """Sample ``group_size`` completions of each of this host's prompts (token ids).

        Random draws depend on ``prompt_number_P``, the numbers (int32, of all hosts' prompts) in the batch that
        these are a part of; None: these are all of it.
        """
        prompt_PS, prompt_mask_PS = pad_left(prompts, self.max_prompt_length, self.tokenizer.pad_id)
        config = EngineConfig(
            group_size=group_size,
            max_completion_length=self.max_completion_length,
            vocab_size=self.tokenizer.vocab_size,
            eos_ids=self.tokenizer.eos_ids,
            pad_id=self.tokenizer.pad_id,
            sampling=sampling,
            num_slots=num_slots,
            num_shards=self.data_shards,
        )
        numbers_P = None if prompt_number_P is None else to_mesh(prompt_number_P, (None,), self.mesh)
        assert numbers_P is None or len(numbers_P) == len(prompts) * jax.process_count(), "a number a prompt"
        with jax.set_mesh(self.mesh):
            return self.compiled(
                model=self.model,
                params=params,
                prompt_PS=to_mesh(prompt_PS, PROMPT_AXES, self.mesh),
                prompt_mask_PS=to_mesh(prompt_mask_PS, PROMPT_AXES, self.mesh),
                key=key,
                stop_table=self.stop_table,
                config=config,
                prompt_number_P=numbers_P,
            )

    def to_host(self, rollout: Rollout) -> HostRollout:
        """Fetch this host's completions and decode them."""
        return self._decode(*(to_host(x, GROUP_AXES, self.mesh) for x in _outputs(rollout)))

    def _decode(self, tokens_PGT: np.ndarray, mask_PGT: np.ndarray, finished_PG: np.ndarray) -> HostRollout:
        lengths_PG = mask_PGT.sum(axis=-1)
        token_ids = [
            [tokens_T[:length].tolist() for tokens_T, length in zip(tokens_GT, lengths_G, strict=True)]
            for tokens_GT, lengths_G in zip(tokens_PGT, lengths_PG, strict=True)
        ]
        return HostRollout(
            token_ids=token_ids,
            texts=[[self.tokenizer.decode(ids) for ids in group] for group in token_ids],
            lengths_PG=lengths_PG,
            finished_PG=finished_PG,
        )

    def generate(
        self,
        params: Params,
        examples: Sequence[Example],
        *,
        num_samples: int,
        seed: int,
        sampling: SamplingParams,
        batch_size: int,
    ) -> list[list[Completion]]:
        """Completions of any number of examples, ``batch_size`` at a time (the last batch is filled up)."""
        completions: list[list[Completion]] = []
        batch_size = self.batch_rows(len(examples), batch_size)
        mine = host_rows(batch_size, self.mesh)
        for start in range(0, len(examples), batch_size):
            batch = [encode_prompt(self.tokenizer, e) for e in examples[start : start + batch_size]]
            filled = batch + [batch[-1]] * (batch_size - len(batch))
            key = jax.random.fold_in(jax.random.key(seed), start)
            rollout = self.rollout(params, filled[mine], key, group_size=num_samples, sampling=sampling)
            completions += self._decode(*map(to_every_host, _outputs(rollout))).completions()[: len(batch)]
        return completions

    def batch_rows(self, num_examples: int, batch_size: int) -> int:
        """Rows of the batches of :meth:`generate`: no more than needed, but as many as the mesh can share."""
        return min(batch_size, -(-num_examples // self.data_shards) * self.data_shards)


def _outputs(rollout: Rollout) -> tuple[Array, Array, Array]:
    return rollout.completion_PGT, rollout.completion_mask_PGT, rollout.finished_PG


def prompt_text(example: Example) -> str:
    """An example's prompt as text, for reward functions and people."""
    return example.prompt if isinstance(example.prompt, str) else plain_prompt(example.prompt)


def encode_prompt(tokenizer: Tokenizer, example: Example) -> list[int]:
    """Token ids of an example's prompt: text as it is, messages in the tokenizer's chat format if it has one."""
    if isinstance(example.prompt, str):
        return tokenizer.encode(example.prompt)
    if tokenizer.has_chat_template:
        return tokenizer.chat(example.prompt)
    return tokenizer.encode(prompt_text(example))


def pad_left(sequences: Sequence[Sequence[int]], length: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids ``[N, length]``, padded on the left, and the mask that is True on real tokens.

    Raises:
        ValueError: a sequence is empty or longer than ``length``.
    """
    ids = np.full((len(sequences), length), pad_id, np.int32)
    mask = np.zeros((len(sequences), length), bool)
    for row, sequence in enumerate(sequences):
        if not 0 < len(sequence) <= length:
            raise ValueError(
                f"prompt {row} has {len(sequence)} tokens, but must have between 1 and "
                f"rollout.max_prompt_length ({length})"
            )
        ids[row, length - len(sequence) :] = sequence
        mask[row, length - len(sequence) :] = True
    return ids, mask
