"""Two processes of four devices on one machine train as one process of eight does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_jax.metrics import read_metrics
from tests.train.conftest import FinishedRun, command

STEPS = 2
PARTS = ("--mesh.data", "4", "--mesh.group", "2", "--rollout.overlap", "--rollout.overlap-parts", "2")
AHEAD = ("--rollout.steps-ahead", "1", "--rollout.extra-rollouts", "1")
SAME_AS_ONE_PROCESS = (
    "Training/Loss",
    "Training/RewardMean",
    "Training/RewardStd",
    "Training/AdvantageNorm",
    "Training/GradNorm",
    "Training/RewardFailures/picky",
    "Policy/Entropy",
    "Performance/CompletionLength",
)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def train_in_two_processes(finished: FinishedRun, run: Path, steps: int, options: Sequence[str]) -> list[str]:
    """What the two processes wrote on their standard outputs."""
    shared = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0",
        "GRPO_JAX_COORDINATOR": f"127.0.0.1:{free_port()}",
        "GRPO_JAX_NUM_PROCESSES": "2",
    }
    words = [sys.executable, "-W", "error", "-m", "grpo_jax", "train", str(finished.experiment)]
    words += ["--workdir", str(run), "--train.steps", str(steps), *options]
    processes = [
        subprocess.Popen(
            words,
            env=shared | {"GRPO_JAX_PROCESS_ID": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    return [out for out, _ in outputs]


def assert_same_batches(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], gap: float) -> None:
    """Metrics of steps of two processes and of one."""
    assert [record["step"] for record in ours] == [record["step"] for record in theirs] == [1, 2]
    for one, several in zip(theirs, ours, strict=True):
        for name in SAME_AS_ONE_PROCESS:
            # Sums over devices in another order, in float32.
            assert several[name] == pytest.approx(one[name], abs=1e-5), name
        assert several["Policy/SamplerGapMax"] < gap
        assert several["Training/RewardFailures/belongs"] == 0


@pytest.mark.parametrize("options", [(), pytest.param(PARTS, marks=pytest.mark.slow)], ids=["in_turn", "parts"])
def test_two_processes_train_as_one(finished: FinishedRun, tmp_path: Path, options: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    outputs = train_in_two_processes(finished, run, STEPS, options)
    # Process 0 alone speaks and writes. (Gloo's threads announce connections on either's standard output, and may
    # cut each other's lines: so ours are looked for by their words, not by their place.)
    words = ("The run is finished", "parameters | devices:", "held-out")
    assert [[word in out for word in words] for out in outputs] == [[True] * 3, [False] * 3], outputs
    assert len(list((run / "tensorboard").iterdir())) == 1
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["0", str(STEPS)]

    theirs = read_metrics(finished.folder / "metrics.jsonl")[:STEPS]
    assert_same_batches(read_metrics(run / "metrics.jsonl"), theirs, gap=1e-4)

    # completions.jsonl holds the first host's prompts: the first half of each batch.
    lines = (finished.folder / "completions.jsonl").read_text().splitlines()
    expected = [r for line in lines if (r := json.loads(line))["step"] <= STEPS]
    expected = [r for step in (1, 2) for r in [r for r in expected if r["step"] == step][:16]]
    got = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    assert len(got) == len(expected) == 32
    for record, other in zip(got, expected, strict=True):
        assert record.pop("advantage") == pytest.approx(other.pop("advantage"), abs=1e-5)
        assert record == other


@pytest.mark.slow
def test_two_processes_a_step_ahead_resume_and_train_as_one(finished: FinishedRun, tmp_path: Path) -> None:
    """The rollout ahead is saved by both and read by both."""
    one = tmp_path / "one"
    train = ("train", finished.experiment, "--workdir", one, "--train.steps", str(STEPS))
    assert command(*train, *AHEAD).status == 0
    for steps in (1, STEPS):
        train_in_two_processes(finished, tmp_path / "two", steps, AHEAD)
    ours, theirs = (read_metrics(folder / "metrics.jsonl") for folder in (tmp_path / "two", one))
    assert_same_batches(ours, theirs, gap=np.inf)
    assert ours[0]["Policy/SamplerGapMax"] < 1e-4 < 1e-3 < ours[1]["Policy/SamplerGapMax"]
