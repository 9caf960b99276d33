"""How a bad value is refused: with its field, itself and the remedy."""

from __future__ import annotations


def require(ok: bool, name: str, value: object, remedy: str) -> None:
    """Refuse a value that is not as it must be."""
    if not ok:
        raise ValueError(f"{name} must be {remedy}, got {value!r}")


def require_divides(part: str, parts: int, whole: str, size: int) -> None:
    """Refuse a split that leaves a rest, and name the nearest ones that don't."""
    if size % parts:
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        below = max((d for d in divisors if d < parts), default=1)
        above = min((d for d in divisors if d > parts), default=size)
        nearest = " and ".join(map(str, sorted({below, above})))
        raise ValueError(f"{part} ({parts}) must divide {whole} ({size}); the nearest that do: {nearest}")
