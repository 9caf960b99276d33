"""Completions of a group laid one after the other in fewer rows, so that little padding passes through the model.

Everything happens on the device and with fixed shapes: a compiled step holds the pass for a few numbers of rows,
and takes the smallest that the completions of every prompt fit into. Nothing is compiled when lengths change.

Shapes: P prompts, G completions of a prompt, T completion tokens, R rows of W = T - 1 places each; N = G + R * W.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from grpo_jax.mesh import GROUP_AXES, PROMPT_AXES, constrain
from grpo_jax.types import Array

# Shorter completions are one row each: the pass over them is cheap, and compiling it several times is not.
_MIN_LENGTH = 128


def row_counts(group_size: int, max_completion_length: int) -> tuple[int, ...]:
    """Numbers of rows that a step is compiled for: a quarter of the group's, half, all; of short ones all."""
    if max_completion_length < _MIN_LENGTH:
        return (group_size,)
    return tuple(sorted({-(-group_size // parts) for parts in (1, 2, 4)}))


@dataclass(frozen=True)
class Packing:
    """Where each token lies that passes through the model: all but a completion's last one."""

    num_rows: int
    length_PG: Array
    """Tokens of a completion; 0 where nothing is wanted of it."""
    place_PGW: Array
    """Places of the tokens in the rows, one row after the other; out of range where there is no token."""

    @property
    def place_PRW(self) -> Array:
        """Each token's place in its completion; 0 where nothing lies, as if it were a completion of one token."""
        return self.lay(jnp.broadcast_to(jnp.arange(self.place_PGW.shape[2])[None, None], self.place_PGW.shape))

    def lay(self, values_PGW: Array) -> Array:
        """Put values into the rows, ``[P, R, W]``; 0 where nothing lies."""
        P, _, W = values_PGW.shape

        def one(values_GW: Array, place_GW: Array) -> Array:
            return jnp.zeros((self.num_rows * W,), values_GW.dtype).at[place_GW].set(values_GW, mode="drop")

        rows_PRW = jax.vmap(one)(values_PGW, self.place_PGW).reshape(P, self.num_rows, W)
        return constrain(rows_PRW, (*PROMPT_AXES, None, None))

    def unlay(self, values_PN: Array) -> Array:
        """Completions ``[P, G, T]`` out of their first values and those in rows; 0 after their lengths."""
        P, G, W = self.place_PGW.shape
        index_PGW = jnp.minimum(G + self.place_PGW, values_PN.shape[1] - 1)
        rest_PGW = jnp.take_along_axis(values_PN, index_PGW.reshape(P, -1), axis=1).reshape(P, G, W)
        values_PGT = jnp.concatenate([values_PN[:, :G, None], rest_PGW], axis=2)
        known_PGT = jnp.arange(W + 1)[None, None] < self.length_PG[..., None]
        return constrain(jnp.where(known_PGT, values_PGT, 0.0), (*GROUP_AXES, None))


def pack(mask_PGT: Array, num_rows: int) -> Packing:
    """Lay the completions, each up to the last token that counts, into rows.

    ``num_rows`` must be at least :func:`rows_needed`: it is not checked, and what does not fit has wrong values.
    """
    length_PG = _lengths(mask_PGT)
    W = mask_PGT.shape[2] - 1
    row_PG, start_PG, _ = _first_fit(length_PG, W)
    token_11W = jnp.arange(W)[None, None]
    place_PGW = (row_PG * W + start_PG)[..., None] + token_11W
    place_PGW = jnp.where(token_11W < length_PG[..., None] - 1, place_PGW, num_rows * W)
    return Packing(num_rows=num_rows, length_PG=length_PG, place_PGW=place_PGW)


def rows_needed(mask_PGT: Array) -> Array:
    """Rows that the prompt with the most of them takes."""
    _, _, held_PG = _first_fit(_lengths(mask_PGT), mask_PGT.shape[2] - 1)
    return (held_PG > 0).sum(axis=1).max()


def _lengths(mask_PGT: Array) -> Array:
    """Tokens up to the last one that counts, ``[P, G]``."""
    return jnp.max(jnp.where(mask_PGT, jnp.arange(1, mask_PGT.shape[2] + 1)[None, None], 0), axis=2)


def _first_fit(length_PG: Array, width: int) -> tuple[Array, Array, Array]:
    """From the longest completion to the shortest, each into the first row with room for all but its last token.

    Returns:
        ``(row_PG, start_PG, held_PG)``: each completion's row and place in it, and the tokens in each row.
    """
    P, G = length_PG.shape
    size_PG = jnp.maximum(length_PG - 1, 0)
    order_PG = jnp.argsort(-size_PG, axis=1)

    def place(held_PG: Array, size_P: Array) -> tuple[Array, tuple[Array, Array]]:
        row_P = jnp.argmax(held_PG + size_P[:, None] <= width, axis=1)
        start_P = jnp.take_along_axis(held_PG, row_P[:, None], axis=1)[:, 0]
        chosen_PG = jnp.arange(G)[None] == row_P[:, None]
        return held_PG + jnp.where(chosen_PG, size_P[:, None], 0), (row_P, start_P)

    sorted_GP = jnp.take_along_axis(size_PG, order_PG, axis=1).T
    held_PG, placed_GP = jax.lax.scan(place, jnp.zeros((P, G), size_PG.dtype), sorted_GP)
    back_PG = jnp.argsort(order_PG, axis=1)
    row_PG, start_PG = (jnp.take_along_axis(x_GP.T, back_PG, axis=1) for x_GP in placed_GP)
    return row_PG, start_PG, held_PG
