"""Log-probabilities and entropies once more: NumPy, float64, all logits at once."""

from __future__ import annotations

import numpy as np

Rows = np.ndarray


def token_logps(
    hidden_ND: Rows, head_VD: Rows, targets_N: Rows, *, temperature: float, vocab_size: int
) -> tuple[Rows, Rows]:
    """Log-probability of each target and the entropy, from all logits at once."""
    hidden, head = np.asarray(hidden_ND, np.float64), np.asarray(head_VD, np.float64)
    logits = hidden @ head[:vocab_size].T / temperature
    top = logits.max(axis=1, keepdims=True)
    logps = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
    return logps[np.arange(len(hidden)), targets_N], -(np.exp(logps) * logps).sum(axis=1)


def token_logps_gradient(
    hidden_ND: Rows,
    head_VD: Rows,
    targets_N: Rows,
    logps_weight_N: Rows,
    entropy_weight_N: Rows,
    *,
    temperature: float,
    vocab_size: int,
) -> tuple[Rows, Rows]:
    """Gradient of ``sum(w * logps + u * entropy)`` for hidden and head.

    With p the probabilities, z the logits and H the entropy: d logp_y / dz = 1_y - p and
    dH / dz = -p (log p + H).
    """
    hidden, head = np.asarray(hidden_ND, np.float64), np.asarray(head_VD, np.float64)
    logits = hidden @ head[:vocab_size].T / temperature
    top = logits.max(axis=1, keepdims=True)
    logps = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
    p = np.exp(logps)
    entropy = -(p * logps).sum(axis=1, keepdims=True)
    one_hot = np.eye(vocab_size)[targets_N]
    d_logits = logps_weight_N[:, None] * (one_hot - p) - entropy_weight_N[:, None] * p * (logps + entropy)
    d_logits /= temperature
    d_head = np.zeros_like(head)
    d_head[:vocab_size] = d_logits.T @ hidden
    return d_logits @ head[:vocab_size], d_head
