"""The endless stream of prompts, whose position is saved and restored."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import jax
from jax.sharding import Mesh

from grpo_jax.mesh import host_rows
from grpo_jax.tasks.base import Example

# As good as endless. Grain's own endless repeat overflows when batches of one are made of it.
_EPOCHS = 2**31


class PromptStream(Iterator[list[Example]]):
    """Batches of examples: this host's contiguous part of each global batch of ``num_prompts``.

    Examples are reshuffled each epoch by seed and epoch. Each epoch goes over all of them; where
    ``num_prompts`` does not divide their number, a batch takes the end of one epoch and the beginning of the
    next. Global batches depend on the examples, ``num_prompts`` and ``seed``, not on the number of hosts.

    Args:
        examples: all training examples, on every host alike.
        num_prompts: P, over all hosts.
        seed: of the order.
        process_index: this host's number; None asks JAX.
        process_count: the number of hosts; None asks JAX.

    Raises:
        ValueError: there are fewer examples than ``num_prompts``, or the hosts don't divide it.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        *,
        num_prompts: int,
        seed: int,
        process_index: int | None = None,
        process_count: int | None = None,
    ) -> None:
        index = jax.process_index() if process_index is None else process_index
        count = jax.process_count() if process_count is None else process_count
        if not 1 <= num_prompts <= len(examples):
            raise ValueError(
                f"rollout.num_prompts must be between 1 and the number of training problems ({len(examples)}), "
                f"got {num_prompts}: lower it, or raise task.num_train if it is set"
            )
        if num_prompts % count:
            raise ValueError(
                f"rollout.num_prompts ({num_prompts}) must be a multiple of the number of hosts ({count})"
            )
        if not 0 <= index < count:
            raise ValueError(f"process_index must be between 0 and {count - 1}, got {index}")
        share = num_prompts // count
        self._identity = {"num_examples": len(examples), "num_prompts": num_prompts, "seed": seed}
        batches = (
            grain.MapDataset.source(examples)
            .shuffle(_spread(seed))
            .repeat(_EPOCHS, reseed_each_epoch=True)
            .batch(num_prompts, batch_fn=list)
            .map(lambda batch: batch[index * share : (index + 1) * share])
        )
        # The examples lie in memory, so threads that read ahead would only cost.
        self._batches = iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))

    def __next__(self) -> list[Example]:
        """This host's part of the next global batch."""
        batch: list[Example] = next(self._batches)
        return batch

    @property
    def epoch(self) -> float:
        """Passes over all examples so far."""
        batches: int = self._batches.get_state()["next_index"]
        return batches * self._identity["num_prompts"] / self._identity["num_examples"]

    def position(self) -> dict[str, Any]:
        """Where the stream stands, as JSON values, the same on all hosts."""
        return {"next_batch": self._batches.get_state()["next_index"], **self._identity}

    def restore(self, position: dict[str, Any]) -> None:
        """Go on as the stream did that gave ``position``, on any number of hosts.

        Raises:
            ValueError: that stream had other batches.
        """
        for name, value in self._identity.items():
            if position[name] != value:
                raise ValueError(
                    f"the saved position in the data was taken with {name}={position[name]}, but {name} is "
                    f"{value} now, so the order of the prompts differs: go on with the same data and settings"
                )
        self._batches.set_state({"next_index": position["next_batch"]})


def _spread(seed: int) -> int:
    """A 32-bit seed; Grain adds the epoch to it, so neighbouring seeds would share all epochs but one."""
    return int.from_bytes(hashlib.sha256(f"prompts/{seed}".encode()).digest()[:4], "big")


def host_stream(examples: Sequence[Example], *, num_prompts: int, seed: int, mesh: Mesh) -> PromptStream:
    """The stream of this host's prompts: the rows of the batch that its devices hold."""
    rows = host_rows(num_prompts, mesh)
    size = rows.stop - rows.start
    return PromptStream(
        examples,
        num_prompts=num_prompts,
        seed=seed,
        process_index=rows.start // size,
        process_count=num_prompts // size,
    )
