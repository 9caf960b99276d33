from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "tpu_setup"

# Runs the command of `gcloud ... ssh --command=...` here, in the place of a host.
GCLOUD = """#!/usr/bin/env bash
for argument in "$@"; do
    if [[ $argument == --command=* ]]; then exec bash -c "${argument#--command=}"; fi
done
"""

# A run that ends when it is interrupted, as `grpo-jax train` does.
GRPO_JAX = """#!/usr/bin/env python3
import os, sys, time
print("coordinator", os.environ["GRPO_JAX_COORDINATOR"], "arguments", sys.argv[1:], flush=True)
try:
    time.sleep(30)
except KeyboardInterrupt:
    print("interrupted and saved", flush=True)
"""

# Tests that run in the background may ignore interrupts, and so would all that they start.
INTERRUPTIBLE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture
def host(tmp_path: Path) -> dict[str, str]:
    """The environment of a make-believe host that is set up already."""
    for name, text in {"bin/gcloud": GCLOUD, "home/grpo_jax/venv/bin/grpo-jax": GRPO_JAX}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "home/grpo_jax/code").mkdir()
    path_variable = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "HOME": str(tmp_path / "home"), "PATH": path_variable}


def _launch(host: dict[str, str], *arguments: str, expected: int = 0) -> str:
    command = [sys.executable, "-c", INTERRUPTIBLE, str(FOLDER / "launch.sh"), *arguments]
    result = subprocess.run(command, env=host, capture_output=True, text=True, timeout=20)
    assert result.returncode == expected, result.stderr
    return result.stdout + result.stderr


def _wait_for(text: str, log: Path) -> None:
    deadline = time.monotonic() + 10
    while not (log.exists() and text in log.read_text()):
        assert time.monotonic() < deadline, f"{text!r} did not appear"
        time.sleep(0.05)


def test_launch_starts_once_shows_and_stops(host: dict[str, str]) -> None:
    log = Path(host["HOME"]) / "grpo_jax/run.log"
    start = ("pod", "zone", "start", "/shared/my run", "experiments/x.py", "--train.steps", "5")
    try:
        assert "started" in _launch(host, *start)
        _wait_for("coordinator", log)
        assert "already running" in _launch(host, *start)
        assert log.read_text().count("coordinator auto") == 1
        expected = ["train", "experiments/x.py", "--train.steps", "5", "--workdir", "/shared/my run"]
        assert str(expected) in log.read_text()
        assert "running (process" in _launch(host, "pod", "zone", "status")
        assert "a run is going on" in _launch(host, "pod", "zone", "setup", expected=1)
    finally:
        assert "interrupted process" in _launch(host, "pod", "zone", "stop")
    _wait_for("interrupted and saved", log)


def test_launch_dry_run_runs_nothing(host: dict[str, str]) -> None:
    shown = _launch(host, "--dry-run", "--project", "mine", "pod", "zone", "start", "/shared/a", "x.py")
    assert shown.startswith("gcloud compute tpus tpu-vm ssh pod ")
    assert shown.rstrip().endswith("--zone=zone --worker=all --project=mine")
    assert not (Path(host["HOME"]) / "grpo_jax/run.log").exists()


@pytest.mark.parametrize(
    ("script", "arguments", "expected"),
    [
        ("launch.sh", ["pod", "zone"], "are needed"),
        ("launch.sh", ["pod", "zone", "go"], "unknown command go"),
        ("launch.sh", ["pod", "zone", "start", "runs/a", "x.py"], "must be an absolute path, got runs/a"),
        ("setup.sh", [], "which devices"),
        ("setup.sh", ["rocm"], "unknown argument rocm"),
        ("setup.sh", ["cpu", "--devices", "none"], "--devices must be a whole number"),
        ("rehearse.sh", ["--processes", "0"], "--processes must be a whole number above 0"),
        ("rehearse.sh", ["--process", "2"], "unknown option --process"),
    ],
)
def test_wrong_arguments(script: str, arguments: list[str], expected: str) -> None:
    result = subprocess.run([str(FOLDER / script), *arguments], capture_output=True, text=True, timeout=20)
    assert result.returncode == 2
    assert expected in result.stderr
