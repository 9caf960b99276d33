"""A process that runs a step when it is asked to, watched so that its failure is not the benchmark's."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_MEMINFO = Path("/proc/meminfo")
_POLL_SECONDS = 0.1


class ProcessFailed(Exception):
    """The process has ended; the message says how."""


class StepProcess:
    """A child of :mod:`experiments.bench.peer_child`'s kind: a line of JSON in, a line of JSON out.

    Args:
        command: what to run, from the root of the repository.
        timeout: seconds that an answer may take.
        reserve_bytes: it is killed when, while it computes, the machine has less memory left.
    """

    def __init__(self, command: Sequence[str], *, timeout: float, reserve_bytes: int) -> None:
        self._timeout, self._reserve = timeout, reserve_bytes
        self._errors = tempfile.TemporaryFile("w+", errors="replace")
        offline = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=ROOT,
            env=os.environ | offline,
            bufsize=0,
            start_new_session=True,
        )

    def request(self, value: Any) -> dict[str, Any]:
        """Send a value, and wait for the answer.

        Raises:
            ProcessFailed: the process ended, took too long, or took too much memory.
        """
        try:
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
        except BrokenPipeError:
            raise ProcessFailed(self._how_it_ended()) from None
        deadline = time.monotonic() + self._timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not selector.select(_POLL_SECONDS):
                if _available_bytes() < self._reserve:
                    self._kill()
                    raise ProcessFailed("out of memory: killed before the machine had none left")
                if time.monotonic() > deadline:
                    self._kill()
                    raise ProcessFailed(f"killed: no answer in {self._timeout:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise ProcessFailed(self._how_it_ended())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Kill the process and all that it has started."""
        self._kill()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            file.close()

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        if code == -signal.SIGKILL:
            return "out of memory: killed by the system"
        if any("RESOURCE_EXHAUSTED" in line or "out of memory" in line.lower() for line in lines[-200:]):
            return "out of memory"
        return f"failed with exit code {code}: {lines[-1] if lines else 'no message'}"


def _available_bytes() -> float:
    """Memory that the machine has left; infinite where it doesn't say."""
    if not _MEMINFO.exists():
        return float("inf")
    (line,) = (line for line in _MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024
