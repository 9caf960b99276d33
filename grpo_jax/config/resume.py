"""Which configurations may go on with a run that another one began."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

RESUMABLE_CHANGES = ("experiment", "train.steps", "log.*", "eval.*", "checkpoint.*")
"""Config fields that a resumed run may change: they do not alter what it computes."""

_ABSENT = "absent"


def config_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """The fields that forbid resuming, one line each: ``rollout.group_size: saved 16, now 8``.

    Args:
        saved: the config in the checkpoint, as nested dictionaries.
        current: the config of the run that wants to resume, likewise.

    Returns:
        Lines in the order of the fields' names; empty if the run may resume. Fields of
        :data:`RESUMABLE_CHANGES` may differ, but for ``train.steps`` under a schedule that depends on it.
    """
    # Through JSON, as the saved one went: tuples become lists.
    before, now = (_flatten(json.loads(json.dumps(config))) for config in (saved, current))
    schedule = now.get("optimizer.schedule")
    lines = []
    for name in sorted(before.keys() | now.keys()):
        if name in before and name in now and before[name] == now[name]:
            continue
        line = f"{name}: saved {_show(before, name)}, now {_show(now, name)}"
        if name == "train.steps" and schedule in ("linear", "cosine"):
            line += f" (the learning-rate schedule {schedule!r} depends on it)"
        elif any(fnmatchcase(name, pattern) for pattern in RESUMABLE_CHANGES):
            continue
        lines.append(line)
    return lines


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _show(config: Mapping[str, Any], name: str) -> str:
    return repr(config[name]) if name in config else _ABSENT
