"""The order of rooms is total (DESIGN.md, Layout): a room imports only rooms below it."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "attnlab"
ROOMS = (
    "__main__", "cli", "commands", "studies", "experiments", "aligning", "reading", "decoding", "training",
    "huggingface", "counting", "recording", "models", "tasks", "report", "analysis", "records", "mechanisms",
    "terminal", "provenance", "files", "registry", "config",
)  # top to bottom  # fmt: skip
STRANGERS = {("models", "tasks"), ("models", "analysis"), ("models", "report"), ("tasks", "mechanisms")}
FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path != SOURCE / "__init__.py"]
DOOR = SOURCE / "huggingface" / "pretrained.py"


def name_room(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def list_imports(path):
    """Every module that a file imports, at the top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_a_room_imports_only_rooms_below_it():
    for path in FILES:
        here = name_room(path)
        for module in list_imports(path):
            top, _, rest = module.partition(".")
            there = rest.split(".")[0]
            if top != "attnlab" or there in (here, "__version__"):
                continue
            assert ROOMS.index(there) > ROOMS.index(here), (
                f"{path.relative_to(SOURCE)} imports {module}, which is above it"
            )
            assert (here, there) not in STRANGERS, (
                f"{here} must not know {there}: {path.relative_to(SOURCE)} imports {module}"
            )


def test_only_one_file_imports_transformers():
    for path in FILES:
        foreign = {module.split(".")[0] for module in list_imports(path)}
        assert path == DOOR or "transformers" not in foreign, path


def test_every_room_has_a_place_in_the_order():
    assert {name_room(path) for path in FILES} == set(ROOMS)


def test_the_page_on_design_names_every_folder():
    page = (SOURCE.parent.parent / "docs" / "design.md").read_text(encoding="utf-8").split("## Where things are")[1]
    named = set(re.findall(r"`(\w+)`", page))
    assert named == {room for room in ROOMS if (SOURCE / room).is_dir()}


def test_kernels_import_only_kernels():
    for path in (SOURCE / "mechanisms" / "kernels").glob("*.py"):
        ours = [module for module in list_imports(path) if module.startswith("attnlab")]
        assert all(module.startswith("attnlab.mechanisms.kernels") for module in ours), path


def test_the_public_names_are_few_and_none_is_a_room():
    import attnlab

    assert len(attnlab.__all__) <= 15
    assert not {name for name in attnlab.__all__ if name in ROOMS}
    for name in attnlab.__all__:
        assert getattr(attnlab, name) is not None
    with pytest.raises(AttributeError, match="'nothing'"):
        attnlab.nothing  # noqa: B018
    assert set(dir(attnlab)) == {*attnlab.__all__, "__version__"}


def test_importing_a_study_does_not_import_the_compiler():
    """torch._dynamo takes longer to import than all of attnlab."""
    code = "import sys, attnlab.studies.snell2021; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


LISTING = "from attnlab.cli import app; app(['list', *{words}], standalone_mode=False)"
COMPLETING = """
import os
from contextlib import suppress
os.environ |= {"_ATTNLAB_COMPLETE": "complete_bash", "COMP_WORDS": "attnlab\\ntrain\\nlanguage\\ns", "COMP_CWORD": "3"}
from attnlab.cli import main
with suppress(SystemExit):
    main()
"""
LIGHT = ["import attnlab", LISTING.format(words=[]), LISTING.format(words=["language"]), COMPLETING]


@pytest.mark.parametrize("code", LIGHT, ids=["import", "list", "list a task", "complete"])
def test_what_needs_no_model_does_not_import_torch(code):
    """torch takes seconds to import, numpy a tenth of one."""
    code += "\nimport sys; sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode == 0
