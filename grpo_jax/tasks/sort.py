"""Sort six digits: ``385102>`` is to be continued with ``012358``.

Small enough to be learned from random weights on a CPU within minutes. The demonstrations are a mixture:
most sort the wrong way round. A model that imitates them succeeds about as often as they are right, so that
what it gains later comes from the reward.
"""

from __future__ import annotations

import random

from grpo_jax.config import TaskConfig
from grpo_jax.rewards.exact import exact_match, whole_text
from grpo_jax.tasks.base import Example, Task, hash_share
from grpo_jax.tokenizer import CharTokenizer

DIGITS = 6
NUM_TRAIN = 8192
NUM_HELDOUT = 1024
WRONG_DEMONSTRATIONS = 0.75
"""Share of the demonstrations that sort in descending order."""
HELDOUT_SHARE = 0.1
"""Share of the multisets of digits that are held out, in every order of theirs."""
ALPHABET = "0123456789>"


def sort_digits(config: TaskConfig, seed: int) -> Task:
    """The task, with problems drawn from ``seed``.

    The multiset of a problem's digits decides whether the problem is held out, whatever the seed: no held-out
    problem is a permutation of a training problem. The reward is 1 for the exact answer, else 0.
    """
    del config  # the problems are made here, not read
    rng = random.Random(f"sort/{seed}")
    problems: dict[bool, dict[str, Example]] = {False: {}, True: {}}
    sizes = {False: NUM_TRAIN, True: NUM_HELDOUT}
    while any(len(problems[heldout]) < size for heldout, size in sizes.items()):
        digits = "".join(rng.choices("0123456789", k=DIGITS))
        heldout = is_heldout(digits)
        if digits not in problems[heldout] and len(problems[heldout]) < sizes[heldout]:
            problems[heldout][digits] = _example(digits, descending=rng.random() < WRONG_DEMONSTRATIONS)
    return Task(
        name="sort",
        train=list(problems[False].values()),
        heldout=list(problems[True].values()),
        rewards=(exact_match(),),
        extract=whole_text,
        correct=lambda completion, example: whole_text(completion) == example.answer,
        tokenizer=CharTokenizer(ALPHABET),
    )


def is_heldout(digits: str) -> bool:
    """Whether a problem is held out; the same for all orders of its digits."""
    return hash_share("sort/" + "".join(sorted(digits))) < HELDOUT_SHARE


def _example(digits: str, *, descending: bool) -> Example:
    return Example(
        prompt=f"{digits}>",
        answer="".join(sorted(digits)),
        demonstration="".join(sorted(digits, reverse=descending)),
    )
