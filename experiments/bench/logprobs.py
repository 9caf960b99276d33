r"""Log-probabilities and entropies, forward and backward: memory and time beside all logits at once.

    JAX_PLATFORMS=cpu python -m experiments.bench.logprobs [--chunk 256] [--tokens 2048] [--alone] [--json FILE]

Vocabulary 151,936, width 896, float32; 2 CPU cores, Python 3.12, JAX 0.12, seed 0, 2026-12-01. Memory is what the
compiled program of 16,384 tokens takes beside inputs and results (that of all logits does not fit here, and does
not run). Seconds are the best of three calls (of two for chunks 256 and 1024, and at 4,096 tokens):

    =================  ========  ============  ============
    \                  memory    2,048 tokens  4,096 tokens
    =================  ========  ============  ============
    all logits         39.83 GB  14.3 s        36.6 s
    blocks, chunk 256   0.09 GB  13.0 s
    blocks, chunk 1024  0.86 GB  11.5 s
    blocks, chunk 2048  1.88 GB  10.1 s        24.9 s
    =================  ========  ============  ============

So 1/21 of the memory and 0.64 to 0.70 of the time (three runs) at the default chunk, 1/428 and 0.91 at 256. The
gradients differ by 1.5e-6 (hidden states) and 1.1e-7 (matrix) of their largest entry. 16,384 tokens took 104.7 s
(``--tokens 16384 --alone --repeats 1``), 0.72 of four times the 36.6 s of 4,096 tokens with all logits.

With all logits there are three matrix products; here four, less one for the part of the logits that
``train.logps_chunk`` lets stay. Three products of 2,048 tokens take 9 to 10 s: with all logits the other 4 to 6 s
go into memory, and the blocks save most of that.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.shapes import require_at_least
from grpo_jax.algorithms.logprobs import scaled_logits, token_logps


def full_logits(hidden: Any, head: Any, targets: Any) -> tuple[Any, Any]:
    """Log-probabilities and entropies by way of all logits at once, their gradient left to JAX."""
    logps_NV = jax.nn.log_softmax(scaled_logits(hidden, head, temperature=1.0, vocab_size=head.shape[0]))
    entropy_N = -jnp.sum(jnp.exp(logps_NV) * logps_NV, axis=-1)
    return jnp.take_along_axis(logps_NV, targets[..., None], axis=-1)[..., 0], entropy_N


def program(function: Any) -> Any:
    """Outputs, and gradients of ``sum(w * logps + u * entropy)`` for hidden states and matrix."""

    def loss(hidden: Any, head: Any, targets: Any, w: Any, u: Any) -> tuple[Any, Any]:
        logps, entropy = function(hidden, head, targets)
        return jnp.sum(w * logps + u * entropy), (logps, entropy)

    return jax.jit(lambda *arrays: jax.grad(loss, argnums=(0, 1), has_aux=True)(*arrays))


def inputs(num_tokens: int, vocabulary: int, width: int, seed: int) -> tuple[Any, ...]:
    """Hidden states of unit size, a matrix that makes logits of a few units, random targets and weights."""
    keys = jax.random.split(jax.random.key(seed), 5)
    return (
        jax.random.normal(keys[0], (num_tokens, width)),
        jax.random.normal(keys[1], (vocabulary, width)) * 2 / width**0.5,
        jax.random.randint(keys[2], (num_tokens,), 0, vocabulary),
        jax.random.normal(keys[3], (num_tokens,)),
        jax.random.normal(keys[4], (num_tokens,)),
    )


def temporary_bytes(function: Any, *shape_and_seed: int) -> int:
    """Memory of the compiled program beside its inputs and results."""
    shapes = jax.eval_shape(functools.partial(inputs, *shape_and_seed))
    return program(function).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


def measure(
    functions: dict[str, Any], arrays: tuple[Any, ...], repeats: int
) -> tuple[dict[str, list[float]], Any]:
    """Seconds of each call, the functions in turn, and the outcome of each as NumPy arrays."""
    compiled = {name: program(f).lower(*arrays).compile() for name, f in functions.items()}
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    outcomes = {}
    for _ in range(repeats):
        for name, run in compiled.items():
            start = time.perf_counter()
            outcome = jax.block_until_ready(run(*arrays))
            seconds[name].append(time.perf_counter() - start)
            outcomes[name] = jax.tree.map(np.asarray, outcome)
            del outcome
    return seconds, outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--chunk", type=int, default=2048, help="train.logps_chunk")
    parser.add_argument("--tokens", type=int, default=4096, help="for the times, and the gradients' difference")
    parser.add_argument("--memory-tokens", type=int, default=16_384, help="for the memory; nothing runs")
    parser.add_argument("--alone", action="store_true", help="time only ours (all logits may not fit)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    try:
        require_at_least(1, args, "vocabulary", "width", "chunk", "tokens", "memory_tokens", "repeats")
    except ValueError as error:
        parser.error(str(error))
    functions = {"full": full_logits, "blocks": functools.partial(token_logps, chunk_size=args.chunk)}
    sizes = (args.vocabulary, args.width, args.seed)
    report: dict[str, Any] = {key: value for key, value in vars(args).items() if key != "json"}
    report["temporary_bytes"] = {n: temporary_bytes(f, args.memory_tokens, *sizes) for n, f in functions.items()}
    timed = {name: f for name, f in functions.items() if name == "blocks" or not args.alone}
    report["seconds"], outcomes = measure(timed, inputs(args.tokens, *sizes), args.repeats)
    print(f"{'':8}{f'temporary GB, {args.memory_tokens} tokens':>30}{f'best seconds, {args.tokens} tokens':>30}")
    for name, seconds in report["seconds"].items():
        print(f"{name:8}{report['temporary_bytes'][name] / 1e9:30.2f}{min(seconds):30.2f}")
    memory = report["temporary_bytes"]
    print(f"memory: 1/{memory['full'] / memory['blocks']:.1f}")
    if not args.alone:
        report["time_ratio"] = min(report["seconds"]["blocks"]) / min(report["seconds"]["full"])
        report["gradient_difference"] = {
            name: float(np.abs(x - y).max() / np.abs(y).max())
            for name, x, y in zip(("hidden", "head"), outcomes["blocks"][0], outcomes["full"][0], strict=True)
        }
        print(f"time: {report['time_ratio']:.2f} x; gradients differ by {report['gradient_difference']}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
