"""How a bad value is refused: with its field, itself and the remedy."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any


def require(ok: bool, name: str, value: object, remedy: str) -> None:
    """Refuse a value that is not as it must be."""
    if not ok:
        raise ValueError(f"{name} must be {remedy}, got {value!r}")


def require_representable(section: str, values: Any) -> None:
    """Refuse numbers that no array holds: in a section, NaN, infinities, and integers of more than 32 bits."""
    for field in fields(values):
        value = getattr(values, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int):
                require(abs(number) < 2**31, f"{section}.{field.name}", value, "below 2**31")
            elif isinstance(number, float):
                require(math.isfinite(number), f"{section}.{field.name}", value, "finite")


def require_divides(part: str, parts: int, whole: str, size: int) -> None:
    """Refuse a split that leaves a rest, and name the nearest ones that don't."""
    if size % parts:
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        below = max((d for d in divisors if d < parts), default=1)
        above = min((d for d in divisors if d > parts), default=size)
        nearest = " and ".join(map(str, sorted({below, above})))
        raise ValueError(f"{part} ({parts}) must divide {whole} ({size}); the nearest that do: {nearest}")
