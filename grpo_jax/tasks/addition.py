r"""Addition after three worked examples, for pretrained models that know no chat format.

The prompt ends with ``57 + 38 =``, without a space after it, since tokenizers put the space before a number
into a token of the completion: that is ``" 95\n"``, and its first line is the answer.
"""

from __future__ import annotations

import random

from grpo_jax.config import TaskConfig
from grpo_jax.rewards.exact import exact_match, first_line
from grpo_jax.tasks.base import Example, Task, hash_share

WORKED_EXAMPLES = 3
HELDOUT_SHARE = 0.2
"""Share of the unordered pairs that are held out."""
NUM_TRAIN = 8192
NUM_HELDOUT = 1024
_ALL_PAIRS_UP_TO = 2

Pair = tuple[int, int]


def addition(config: TaskConfig, seed: int, *, digits: int = 2) -> Task:
    """Sums of two numbers of ``digits`` digits, exact match on the first line.

    An unordered pair decides whether its two sums are held out, whatever the seed: neither a held-out sum nor
    the same with its terms swapped is trained on, or shown as a worked example.

    Args:
        config: not used; the problems are made here.
        seed: of the problems' order and their worked examples, and of the choice among many-digit problems.
        digits: of each term. Up to two digits all pairs there are make the problems.

    Raises:
        ValueError: ``digits`` is not between 1 and 9.
    """
    del config
    if not 1 <= digits <= 9:
        raise ValueError(f"digits must be between 1 and 9, got {digits}")
    rng = random.Random(f"addition/{digits}/{seed}")
    train, heldout = _split_pairs(rng, digits)
    return Task(
        name="addition" if digits == 2 else f"addition{digits}",
        train=[_example(rng, pair, train) for pair in train],
        heldout=[_example(rng, pair, train) for pair in heldout],
        rewards=(exact_match(first_line),),
        extract=first_line,
        correct=lambda completion, example: first_line(completion) == example.answer,
        stop=("\n",),
    )


def is_heldout(pair: Pair) -> bool:
    """Whether a sum is held out; the same for its terms swapped."""
    low, high = sorted(pair)
    return hash_share(f"addition/{low}+{high}") < HELDOUT_SHARE


def _split_pairs(rng: random.Random, digits: int) -> tuple[list[Pair], list[Pair]]:
    """Training pairs and held-out pairs, in random order."""
    terms = range(0 if digits == 1 else 10 ** (digits - 1), 10**digits)
    if digits <= _ALL_PAIRS_UP_TO:
        pairs = [(a, b) for a in terms for b in terms]
        rng.shuffle(pairs)
        train = [pair for pair in pairs if not is_heldout(pair)]
        return train, [pair for pair in pairs if is_heldout(pair)]
    chosen: dict[bool, dict[Pair, None]] = {False: {}, True: {}}
    sizes = {False: NUM_TRAIN, True: NUM_HELDOUT}
    while any(len(chosen[heldout]) < size for heldout, size in sizes.items()):
        pair = (rng.choice(terms), rng.choice(terms))
        if len(chosen[is_heldout(pair)]) < sizes[is_heldout(pair)]:
            chosen[is_heldout(pair)][pair] = None
    return list(chosen[False]), list(chosen[True])


def _example(rng: random.Random, pair: Pair, shown: list[Pair]) -> Example:
    """A problem after worked examples that are others than it, in either order of the terms."""
    worked: list[Pair] = []
    while len(worked) < WORKED_EXAMPLES:
        candidate = rng.choice(shown)
        if all(sorted(candidate) != sorted(other) for other in [pair, *worked]):
            worked.append(candidate)
    lines = [f"{a} + {b} = {a + b}\n" for a, b in worked]
    a, b = pair
    return Example(prompt="".join(lines) + f"{a} + {b} =", answer=str(a + b), demonstration=f" {a + b}")
