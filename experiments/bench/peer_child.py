"""What the processes of the peer benchmark share: the problem, its prompts and reward, the talk with the parent.

It is imported in three environments, and needs NumPy alone. A process reads a problem, JSON in a line, says what
it has built, and then answers each line that it reads with the seconds of one step.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PROMPT_BATCHES = 32
"""Batches of different prompts; after that they come again."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A Llama model of random weights with tied embeddings, and the sizes of a step; in float32."""

    vocab_size: int
    num_layers: int
    width: int
    ffn_width: int
    num_heads: int
    num_kv_heads: int
    rope_theta: float
    norm_eps: float
    remat: bool
    """Whether the backward pass recomputes whole layers."""
    prompts: int
    group: int
    prompt: int
    """Tokens of every prompt."""
    completion: int
    """Tokens of every completion."""
    micro_batches: int
    """Parts whose gradients are summed to one update."""
    learning_rate: float = 1e-6
    clip_norm: float = 1.0
    seed: int = 0

    @property
    def eos_id(self) -> int:
        """Ends a completion, and none does: the model has no logit for it."""
        return self.vocab_size

    @property
    def pad_id(self) -> int:
        """Never sampled either."""
        return self.vocab_size + 1


def prompt_texts(problem: Problem) -> list[str]:
    """Prompts for ``PROMPT_BATCHES`` batches: random ids as decimal words."""
    shape = (PROMPT_BATCHES * problem.prompts, problem.prompt)
    ids = np.random.default_rng(problem.seed).integers(problem.vocab_size, size=shape)
    return [decode(row) for row in ids.tolist()]


def encode(text: str) -> list[int]:
    """The ids that a text names."""
    return [int(word) for word in text.split()]


def decode(ids: Sequence[int]) -> str:
    """The text that names the ids."""
    return " ".join(map(str, ids))


def count_sevens(completions: Sequence[str], **_: Any) -> list[float]:
    """The reward: it takes no time and differs between completions."""
    return [float(text.count("7")) for text in completions]


class Channel:
    """The talk with the parent, over stdin and what was stdout."""

    def __init__(self) -> None:
        # Libraries print what they like: from here on that goes to stderr.
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self.problem = Problem(**json.loads(sys.stdin.readline()))

    def ready(self, *, parameters: int, versions: dict[str, str]) -> None:
        """Say what has been built."""
        self._say(parameters=parameters, versions=versions)

    def wait(self) -> None:
        """Wait to be asked for a step; end the process where the parent has gone."""
        if not sys.stdin.readline():
            # Whatever thread this is, and without the trainers' own farewells.
            os._exit(0)

    def answer(self, *, rollout: float, step: float, tokens: int) -> None:
        """A step's seconds, those of them before the update, and the completion tokens that it trained on."""
        self._say(rollout=rollout, update=step - rollout, tokens=tokens)

    def _say(self, **values: Any) -> None:
        print(json.dumps(values), file=self._answers)
