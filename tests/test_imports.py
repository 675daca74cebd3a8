"""Imports go one way (DESIGN.md): cli → studies → {train, …} → {models, tasks} → mechanisms → kernels."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "attnlab"
RANKS = {
    "cli": 7,
    "terminal": 0,
    "studies": 6,
    "train": 5, "decode": 5, "store": 5, "runs": 5, "recipe": 5, "evaluation": 5,
    "optimise": 5, "population": 5, "checkpointing": 5, "stepping": 5, "updates": 5, "score": 5, "search": 5,
    "diagnosis": 5, "inspection": 5, "aligning": 5, "scheduling": 5,
    "models": 4, "tasks": 4,
    "mechanisms": 3,
    "report": 2, "analysis": 2,
    "recording": 1,
    "config": 0,
}  # fmt: skip
STRANGERS = {("tasks", "models"), ("models", "tasks"), ("tasks", "mechanisms"), ("mechanisms", "report")}


def room(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path):
    """Every module of attnlab that a file imports, at the top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path != SOURCE / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way(path):
    here = room(path)
    for module in imported(path):
        if not module.startswith("attnlab."):
            continue
        there = module.split(".")[1]
        if there in ("__version__", "MECHANISMS", "Mechanism", "Record") or there == here:
            continue
        assert RANKS[there] <= RANKS[here], f"{path.name} imports {module}"
        assert (here, there) not in STRANGERS, f"{here} and {there} do not know each other: {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_one_file_imports_transformers(path):
    if path != SOURCE / "models" / "pretrained.py":
        assert not any(module.split(".")[0] == "transformers" for module in imported(path))


def test_every_room_has_a_rank_and_every_rank_a_room():
    assert {room(path) for path in FILES} == set(RANKS)


def test_kernels_know_no_mechanism():
    for path in (SOURCE / "mechanisms" / "kernels").glob("*.py"):
        ours = [module for module in imported(path) if module.startswith("attnlab")]
        assert all(module.startswith("attnlab.mechanisms.kernels") for module in ours), path


def test_the_public_names_are_few_and_none_is_a_room():
    import attnlab

    assert len(attnlab.__all__) <= 15
    assert not {name for name in attnlab.__all__ if name in RANKS}
    for name in attnlab.__all__:
        assert getattr(attnlab, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        attnlab.nothing  # noqa: B018


def test_a_study_is_there_before_the_compiler():
    """torch._dynamo takes longer to import than all of attnlab."""
    code = "import sys, attnlab.studies.snell2021; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
