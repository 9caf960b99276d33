"""A module imports only from lower floors, and files of a folder don't import each other in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "grpo_jax"

# What stands on each floor: a file or a folder directly in the package. Things on one floor are apart.
FLOORS = (
    ("types", "config"),
    ("mesh", "algorithms", "optim", "rewards", "tokenizer", "allocator"),
    ("models", "tasks"),
    ("data", "rollout", "checkpoint", "metrics", "console"),
    ("evaluate",),
    ("train",),
    ("cli",),
    ("__main__",),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}

# Never a run-time dependency, not even behind an option.
FORBIDDEN = ("torch",)


def modules(package: Path) -> dict[str, Path]:
    """Dotted name -> file, for every module of the package."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_names(name: str, path: Path) -> Iterator[tuple[str, str | None]]:
    """``(module, name or None)`` of each import anywhere in the file, also inside functions."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - (node.level - 1)]
                base = ".".join([*above, base]) if base else ".".join(above)
            yield from ((base, alias.name) for alias in node.names)


def imports(package: Path) -> dict[str, set[str]]:
    """Each module's imports of other modules of the package; ``from folder import file`` is the file."""
    known = modules(package)
    edges: dict[str, set[str]] = {}
    for name, path in known.items():
        targets = set()
        for module, attribute in imported_names(name, path):
            inner = f"{module}.{attribute}"
            target = inner if inner in known else module
            if target.split(".")[0] == package.name and target != name:
                targets.add(target)
        edges[name] = targets
    return edges


def part_of(module: str) -> str | None:
    """The file or folder directly in the package that the module belongs to; None: the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def violations(package: Path) -> list[str]:
    """Everything that breaks the rule, one sentence each."""
    found = []
    for name, targets in imports(package).items():
        part = part_of(name)
        if part is None:
            found += [f"{name} is imported before all else, so it must not import {t}" for t in targets]
            continue
        if part not in FLOOR_OF:
            found.append(f"{name} has no floor: add {part!r} to the table")
            continue
        for target in sorted(targets):
            other = part_of(target)
            if other is None or other == part:
                continue
            if other not in FLOOR_OF:
                found.append(f"{name} imports {target}, which has no floor")
            elif FLOOR_OF[other] > FLOOR_OF[part]:
                found.append(f"{name} (floor {FLOOR_OF[part]}) imports {target} (floor {FLOOR_OF[other]})")
            elif FLOOR_OF[other] == FLOOR_OF[part]:
                found.append(f"{name} imports {target} of its own floor {FLOOR_OF[part]}")
    return found


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """A circle of imports for each module that is in one."""
    found = []
    for start in edges:
        paths = [[start]]
        seen = set()
        while paths:
            path = paths.pop()
            for target in edges.get(path[-1], ()):
                if target == start:
                    found.append([*path, start])
                elif target not in seen:
                    seen.add(target)
                    paths.append([*path, target])
    return found


def forbidden_imports(package: Path) -> list[str]:
    return [
        f"{name} imports {module}"
        for name, path in modules(package).items()
        for module, _ in imported_names(name, path)
        if module.split(".")[0] in FORBIDDEN
    ]


def test_no_module_imports_a_higher_floor_or_its_own() -> None:
    assert len(modules(PACKAGE)) > 2
    assert violations(PACKAGE) == []


def test_imports_have_no_circle() -> None:
    assert cycles(imports(PACKAGE)) == []


def test_torch_is_never_imported() -> None:
    assert forbidden_imports(PACKAGE) == []


# ------------------------------------------------------------------------------ the check itself


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("types.py", "from pkg.config import Config", "pkg.types imports pkg.config of its own floor 0"),
        ("algorithms/kl.py", "import pkg.train.step", r"kl \(floor 1\) imports pkg.train.step"),
        ("data.py", "def f():\n    from . import train", r"pkg.data \(floor 3\) imports pkg.train"),
        ("train/step.py", "from ..cli import main", r"pkg.train.step \(floor 5\) imports pkg.cli"),
        ("rollout/engine.py", "from pkg import data", "engine imports pkg.data of its own floor 3"),
        ("utils.py", "", "pkg.utils has no floor"),
        ("__init__.py", "from pkg.config import Config", "pkg is imported before all else"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path, file, source, expected) -> None:
    package = write_package(tmp_path, {file: source})
    with pytest.raises(AssertionError, match=expected):
        assert violations(package) == [], violations(package)


def test_a_circle_is_found(tmp_path) -> None:
    package = write_package(
        tmp_path,
        {
            "models/hf.py": "from pkg.models.decoder import x",
            "models/decoder.py": "from pkg.models import gguf",
            "models/gguf.py": "from .hf import y",
        },
    )
    circle = [f"pkg.models.{name}" for name in ("hf", "decoder", "gguf", "hf")]
    assert circle in cycles(imports(package))


def test_an_optional_torch_is_found(tmp_path) -> None:
    package = write_package(tmp_path, {"models/hf.py": "try:\n    from torch.nn import Module\nexcept: pass"})
    assert forbidden_imports(package) == ["pkg.models.hf imports torch.nn"]


def test_what_is_allowed_is_not_reported(tmp_path) -> None:
    package = write_package(
        tmp_path,
        {
            "models/__init__.py": "from pkg.models.hf import load",
            "models/hf.py": "from pkg.models import config\nfrom pkg.types import Params\nimport numpy",
            "tasks/sort.py": "from pkg.rewards import Reward\nfrom pkg.tokenizer import Tokenizer",
            "cli.py": "from pkg import train",
        },
    )
    assert violations(package) == []
    assert cycles(imports(package)) == []
    assert forbidden_imports(package) == []


def write_package(tmp_path: Path, files: dict[str, str]) -> Path:
    """A package of empty modules, one for each part, but for the files given."""
    package = tmp_path / "pkg"
    folders = ("algorithms", "models", "rewards", "rollout", "tasks", "train")
    empty = [f"{name}.py" for name in ("types", "config", "tokenizer", "data", "cli")]
    empty += [f"{folder}/__init__.py" for folder in folders] + ["__init__.py", "models/config.py"]
    for name, source in {**dict.fromkeys(empty, ""), **files}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return package
