"""The benchmark against TRL and Tunix: its processes, its order and its table; with stand-ins for the peers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.bench import peers
from experiments.bench.peer_process import ProcessFailed, StepProcess

# Answers 2 s + 1 s a step, and appends its name to a file, so that the order can be seen.
STAND_IN = """
import json, sys
name, log, mode = sys.argv[1:]
problem = json.loads(sys.stdin.readline())
print(json.dumps({"parameters": 100, "versions": {name: "1"}}), flush=True)
for line in sys.stdin:
    with open(log, "a") as file:
        file.write(name + " ")
    if mode == "dies":
        sys.exit("no such kernel")
    if mode == "starves":
        raise MemoryError("RESOURCE_EXHAUSTED: could not allocate")
    size = problem["prompts"] * problem["group"] * problem["completion"]
    scale = {"ours": 1.0, "trl": 2.0, "tunix": 4.0}[name]
    print(json.dumps({"rollout": 2 * scale, "update": scale, "tokens": size - (mode == "cheats")}), flush=True)
"""


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Name -> what the stand-in of that name does."""
    modes = {"ours": "works", "trl": "works", "tunix": "works"}

    class StandIn(StepProcess):
        def __init__(self, command: list[str], **options: Any) -> None:
            name = command[-1].removeprefix("experiments.bench.peer_")
            super().__init__([command[0], "-c", STAND_IN, name, str(tmp_path / "log"), modes[name]], **options)

    monkeypatch.setattr(peers, "StepProcess", StandIn)
    return modes


def options(**values: Any) -> peers.Options:
    python = Path(sys.executable)
    defaults = {"trl_python": python, "tunix_python": python, "models": ("tiny",), "prompt_lengths": (66,)}
    return peers.Options(**{**defaults, "reserve_gib": 0.0, "repeats": 3, "warmup": 1, **values})


def compare() -> list[peers.Row]:
    rows = [peers.Row("tiny", 66, name) for name in options().systems()]
    peers.compare(rows, options())
    return rows


def test_steps_alternate_and_medians_are_compared(stand_ins: dict[str, str], tmp_path: Path) -> None:
    rows = compare()
    log = (tmp_path / "log").read_text().split()
    assert log == ["ours", "trl", "tunix"] + "ours trl tunix trl tunix ours tunix ours trl".split()
    assert {row.system: row.steps for row in rows} == {"ours": [3.0] * 3, "trl": [6.0] * 3, "tunix": [12.0] * 3}
    assert {r["peer"]: r["ratio"] for r in peers.ratios(rows)} == {"trl": 0.5, "tunix": 0.25}
    assert "| tiny | 66 | trl | 4.000 | 2.000 | 6.000 | 6.000 to 6.000 | 0.50 |" in peers.table(rows)


@pytest.mark.parametrize(
    ("mode", "said"), [("dies", "failed with exit code 1: no such kernel"), ("starves", "out of memory")]
)
def test_a_peer_that_fails_is_a_row(stand_ins: dict[str, str], tmp_path: Path, mode: str, said: str) -> None:
    stand_ins["trl"] = mode
    rows = compare()
    assert {row.system: row.failure for row in rows} == {"ours": None, "trl": said, "tunix": None}
    assert [r["peer"] for r in peers.ratios(rows)] == ["tunix"]
    assert f"| tiny | 66 | trl | {said} |" in peers.table(rows)
    peers.write_json(tmp_path / "results.json", rows, options())
    written = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row.get("median_steps") for row in written] == [3.0, None, 12.0]


def test_other_work_is_not_compared(stand_ins: dict[str, str]) -> None:
    stand_ins["tunix"] = "cheats"
    with pytest.raises(ValueError, match="tunix has 4095 completion tokens, but the comparison is of 4096"):
        compare()


def test_a_process_is_killed_before_memory_is_gone_or_time_is_up() -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    for limits, said in (
        ({"timeout": 60, "reserve_bytes": 2**60}, "out of memory: killed"),
        ({"timeout": 0.2, "reserve_bytes": 0}, r"killed: no answer in 0\.2 s"),
    ):
        process = StepProcess(sleeper, **limits)
        with contextlib.closing(process), pytest.raises(ProcessFailed, match=said):
            process.request("step")


def test_options_name_the_mistake() -> None:
    with pytest.raises(ValueError, match="trl_micro_batches must divide the 8 prompts of tiny, got 3"):
        options(trl_micro_batches=3)
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        options(repeats=0)


@pytest.mark.slow
def test_our_process_runs_whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS")  # the eight devices of these tests
    problem = dataclasses.replace(peers.make_problem("tiny", 5, 2), num_layers=1, prompts=2, group=3, completion=4)
    process = StepProcess([sys.executable, "-m", "experiments.bench.peer_ours"], timeout=300, reserve_bytes=0)
    with contextlib.closing(process):
        built = process.request(dataclasses.asdict(problem))
        # Embedding, four attention matrices, three of the feed-forward layer, three norms.
        D, F, V = problem.width, problem.ffn_width, problem.vocab_size
        assert built["parameters"] == V * D + 2 * D * D + 2 * D * D // 2 + 3 * D * F + 3 * D
        answers = [process.request("step") for _ in range(2)]
    assert [answer["tokens"] for answer in answers] == [2 * 3 * 4] * 2
    assert all(answer["rollout"] > 0 and answer["update"] > 0 for answer in answers)
