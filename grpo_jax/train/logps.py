"""Log-probabilities of completions under a model: the prompt passes through it once for its group.

Shapes: P prompts, G completions of a prompt, T completion tokens, R rows of W places, D width, N = G + R * W.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from grpo_jax.algorithms.logprobs import token_logps
from grpo_jax.mesh import GROUP_AXES, PROMPT_AXES, constrain
from grpo_jax.train.packing import Packing
from grpo_jax.types import Array, Model, Params


def completion_logps(
    model: Model,
    params: Params,
    prompt_PS: Array,
    prompt_mask_PS: Array,
    completion_PGT: Array,
    *,
    temperature: float,
    vocab_size: int,
    chunk_size: int,
    packing: Packing | None = None,
) -> tuple[Array, Array]:
    """Log-probability and entropy of each completion token, the prompt run once for its group.

    Args:
        model: the policy's functions.
        params: its parameters.
        prompt_PS: left-padded prompts.
        prompt_mask_PS: True on real prompt tokens.
        completion_PGT: right-padded ids; padding gets values too, for the caller to mask.
        temperature: that the tokens were sampled at, above 0.
        vocab_size: ids that the tokenizer knows.
        chunk_size: tokens whose logits are held at a time.
        packing: where tokens lie in fewer rows; None: one row a completion.

    Returns:
        ``(logps_PGT, entropy_PGT)``, at the sampling temperature; where packed, 0 after each completion's length.
    """
    P, G, _ = completion_PGT.shape
    prefix = model.prefill(params, prompt_PS, prompt_mask_PS)
    # The prompt's last hidden state predicts the first token, each token's the next one.
    first_PG1D = jnp.broadcast_to(prefix.hidden_PD[:, None, None], (P, G, 1, prefix.hidden_PD.shape[-1]))
    logps_and_entropy = functools.partial(
        token_logps,
        head_VD=model.head(params),
        temperature=temperature,
        vocab_size=vocab_size,
        chunk_size=chunk_size,
    )
    if packing is None:
        hidden_PGTD, _ = model.extend(params, completion_PGT[:, :, :-1], prefix)
        hidden_PGTD = constrain(jnp.concatenate([first_PG1D, hidden_PGTD], axis=2), (*GROUP_AXES, None, None))
        return logps_and_entropy(hidden_PGTD, targets_N=completion_PGT)
    tokens_PRW, targets_PRW = (packing.lay(completion_PGT[:, :, part]) for part in (slice(-1), slice(1, None)))
    hidden_PRWD, _ = model.extend(params, tokens_PRW, prefix, place_PGT=packing.place_PRW)
    hidden_PND = jnp.concatenate([first_PG1D[:, :, 0], hidden_PRWD.reshape(P, -1, hidden_PRWD.shape[-1])], axis=1)
    targets_PN = jnp.concatenate([completion_PGT[:, :, 0], targets_PRW.reshape(P, -1)], axis=1)
    hidden_PND = constrain(hidden_PND, (*PROMPT_AXES, None, None))
    logps_PN, entropy_PN = logps_and_entropy(hidden_PND, targets_N=targets_PN)
    return packing.unlay(logps_PN), packing.unlay(entropy_PN)
