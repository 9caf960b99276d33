"""Stop strings as an automaton over token ids, so that they are found on the device, across token borders."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def stop_table(token_bytes: Sequence[bytes], stop: Sequence[str]) -> np.ndarray | None:
    """The transition table ``next_state[state, token]`` (int16) that finds any of the stop strings.

    A state is the longest beginning of a stop string that the text so far ends with (Aho-Corasick); 0 is none,
    the last state means that one has been seen, and stays. Text after the stop string in the same token does
    not hinder. Built once on the host.

    Args:
        token_bytes: the bytes that each id adds to the text.
        stop: the stop strings.

    Returns:
        ``[states, V]``, or None without stop strings.

    Raises:
        ValueError: an empty stop string.
    """
    if not stop:
        return None
    patterns = [text.encode() for text in stop]
    if not all(patterns):
        raise ValueError(f"stop must not hold an empty string, got {list(stop)!r}")
    byte_table, num_states = _byte_automaton(patterns)
    longest = max(map(len, token_bytes), default=0)
    padded_VB = np.zeros((len(token_bytes), longest), np.uint8)
    length_V = np.array([len(b) for b in token_bytes])
    for row, text in zip(padded_VB, token_bytes, strict=True):
        row[: len(text)] = np.frombuffer(text, np.uint8)
    state = np.repeat(np.arange(num_states, dtype=np.int16)[:, None], len(token_bytes), axis=1)
    for position in range(longest):
        following = byte_table[state, padded_VB[None, :, position]]
        state = np.where(position < length_V[None, :], following, state)
    return state


def _byte_automaton(patterns: Sequence[bytes]) -> tuple[np.ndarray, int]:
    """The Aho-Corasick automaton over bytes: ``next_state[state, byte]``, and the number of states."""
    prefixes = {b""} | {pattern[:end] for pattern in patterns for end in range(len(pattern))}
    ordered = sorted(prefixes, key=len)
    index = {prefix: number for number, prefix in enumerate(ordered)}
    seen = len(ordered)
    table = np.zeros((seen + 1, 256), np.int16)
    table[seen] = seen
    for prefix in ordered:
        for byte in range(256):
            text = prefix + bytes([byte])
            if any(text.endswith(pattern) for pattern in patterns):
                table[index[prefix], byte] = seen
            else:
                suffix = next(text[start:] for start in range(len(text) + 1) if text[start:] in index)
                table[index[prefix], byte] = index[suffix]
    return table, seen + 1
