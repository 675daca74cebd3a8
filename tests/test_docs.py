"""The site: a page for each mechanism and task, made from the code; every page is in the nav, every anchor is there.

A page of a mechanism, an analysis, a task or a study has an equation, a picture, how to run it and what to read in it.
"""

import html.parser
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

import attnlab
from attnlab.analysis import ANALYSES
from attnlab.cli import app
from attnlab.mechanisms import MECHANISMS
from attnlab.models.presets import PRESETS
from attnlab.models.transformer import build
from attnlab.report.packing import pack_view
from attnlab.studies import STUDIES
from attnlab.tasks import TASKS

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
NAV = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
KINDS = ["Home", "Tutorials", "How to", "Reference", "Explanation"]


def leaves(tree):
    if isinstance(tree, str):
        return [tree]
    return [leaf for part in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves(part)]


def list_pages(tree, title):
    """Return the pages of a part of the nav, wherever it is."""
    parts = [pair for entry in tree for pair in entry.items() if isinstance(pair[1], list)]
    return [page for name, part in parts for page in (leaves(part) if name == title else list_pages(part, title))]


MEASURED = [  # pages of analyses and studies, and how-to pages that define measures
    page.removesuffix(".md")
    for page in (*list_pages(NAV, "Analyses"), *list_pages(NAV, "Studies"), *list_pages(NAV, "Read a model"),
                 "alignment.md", "diagnose.md")
    if page != "analyses.md"
]  # fmt: skip

docs = pytest.mark.docs


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "tools" / "pages.py"))


@pytest.fixture(scope="module")
def made(script):
    return script["render_pages"]() | runpy.run_path(str(ROOT / "tools" / "site_text.py"))["render_notebooks"]()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as make docs builds it; a broken link, or a name that the reference does not find, is an error."""
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(
        words, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


class Text(html.parser.HTMLParser):
    """What a reader sees of a page, and its elements."""

    def __init__(self, content):
        super().__init__()
        self.seen, self.elements = [], set()
        self.feed(content)

    def handle_data(self, data):
        self.seen.append(data)

    def handle_starttag(self, tag, attributes):
        self.elements.add(tag)


def written(name):
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def anchors(text):
    """As Python-Markdown names headings."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    bare = (re.sub(r"[^\w\s-]", "", title.replace("`", "").encode("ascii", "ignore").decode()) for title in titles)
    return {re.sub(r"[-\s]+", "-", title.strip().lower()) for title in bare}


@docs
def test_the_nav_is_the_site(made, script):
    nav = leaves(script["fill_nav"](NAV))
    pages = {path.name for path in DOCS} | {name for name in made if name.endswith(".md")}
    assert [*(title for entry in NAV for title in entry)] == KINDS
    assert set(nav) == pages
    assert len(nav) == len(set(nav))


@docs
@pytest.mark.parametrize("name", MECHANISMS)
def test_a_mechanism_s_page_has_equation_picture_command_and_what_to_read(made, name):
    page = made[f"mechanisms/{name}.md"]
    assert re.search(r"^    \S", page, re.MULTILINE), "no equation"
    assert f"({name}.png)" in page
    assert made[f"mechanisms/{name}.png"].startswith(b"\x89PNG")
    assert f"attnlab check {name}" in page
    assert re.search(r"^\| laws \| \d+ of \d+ hold", page, re.MULTILINE)
    assert f"class {MECHANISMS[name].__name__}" in page
    assert len(page.split("## What to read in it")[1].split("## Options")[0].strip()) > 30


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_mechanism_s_docstring_names_its_paper_and_then_has_the_equation(name):
    first, _, rest = sys.modules[MECHANISMS[name].__module__].__doc__.partition("\n\n")
    assert re.fullmatch(r"[^(\n]+ \(.*\d{4}.*\): .+\.", first), first
    assert rest.startswith("    ")


@docs
def test_the_table_has_every_mechanism_with_all_its_laws(made):
    rows = re.findall(r"^\| \[(.+?)\]\(.+?\) \| (.*) \|$", made["mechanisms/table.md"], re.MULTILINE)
    assert [name for name, _ in rows] == list(MECHANISMS)
    cells = {name: re.split(r" \| (?=[^|`]*(?: \| |$))", row) for name, row in rows}
    assert {len(row) for row in cells.values()} == {7}
    assert cells["softmax"][:3] == ["`S = q kᵀ / √d` `P = softmax(S)`", "0", "plain"]
    assert cells["fox"][1:3] == ["4,104", "gated, positional, self-only"]
    assert cells["fox"][4:6] == ["yes", "keys, values, key side"]
    assert "fail" not in made["mechanisms/table.md"]


@docs
def test_the_mechanism_that_the_page_builds_is_fox_in_under_thirty_lines(tmp_path, monkeypatch):
    page = written("own-mechanism")
    first, second = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(first.splitlines()) < 30
    (tmp_path / "forgetting.py").write_text(first, encoding="utf-8")
    (tmp_path / "gate.py").write_text(f"{first}\n{second}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    small = {"steps=30": "steps=2"}
    lines = re.search(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1].splitlines()
    for line in [*lines, "attnlab check ./gate.py:HeadGate"]:
        words = [small.get(word, word) for word in shlex.split(line, comments=True)[1:]]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, (words, result.output, result.exception)
    mine, fox = (attnlab.attention(name, heads=2, head_dim=3) for name in ("./forgetting.py:Forgetting", "fox"))
    fox.load_state_dict({f"forget.{name}": x for name, x in mine.gate.state_dict().items()})
    q, k, v, x = torch.randn(2, 2, 5, 3), torch.randn(2, 2, 5, 3), torch.randn(2, 2, 5, 3), torch.randn(2, 5, 6)
    contexts = [m(q, k, v, causal=True, sides=(None, m.key_side(x)))[0] for m in (mine, fox)]
    torch.testing.assert_close(*contexts)


@docs
@pytest.mark.parametrize("name", TASKS)
def test_a_task_s_page_has_equation_picture_what_to_read_command_and_every_key(made, name):
    page = made[f"tasks/{name}.md"]
    assert re.search(r"^    loss = |^    permutation, subset", page, re.MULTILINE), "no equation"
    assert f"({name}.png)" in page
    assert made[f"tasks/{name}.png"].startswith(b"\x89PNG")
    assert "What to read in it" in page
    assert f"attnlab train {name}" in page
    assert "| `steps` |" in page
    assert "| `data` |" in page


EQUATION = r"^    (?!attnlab |python )\S.* [=≤∝≫] .*\S"  # in a block of its own, with room around its sign


@pytest.mark.parametrize("name", MEASURED)
def test_the_page_of_an_analysis_or_a_study_has_equation_picture_command_and_what_to_read(name):
    page = written(name)
    assert name in ("viewer", "inspect") or re.search(EQUATION, page, re.MULTILINE), "no equation"
    assert re.search(rf"!\[.{{30,}}\]\(images/{name}\.png\)", page), "no picture, or its alt text says little"
    assert f"python tools/pictures.py {name}" in page
    assert re.search(r"^    attnlab \w+|^attnlab \w+|^(from|import) attnlab|`attnlab \w+ ", page, re.MULTILINE), (
        "no command"
    )
    assert re.search(r"^## What to read in it|^\| .* \| what to read in it", page, re.MULTILINE)


def test_every_study_with_results_has_a_page():
    assert {name for name in STUDIES if (ROOT / "results" / name).is_dir()} <= set(MEASURED)


@docs
def test_pictures_are_those_of_the_script_shown_and_light():
    script = runpy.run_path(str(ROOT / "tools" / "pictures.py"))
    pictures, heaviest = script["PICTURES"], script["HEAVIEST"]
    files = {path.stem: path for path in (ROOT / "docs" / "images").iterdir()}
    shown = {
        name for path in DOCS for name in re.findall(r"\(images/([\w-]+)\.png\)", path.read_text(encoding="utf-8"))
    }
    assert set(pictures) <= set(files) == shown
    assert {name: path.stat().st_size for name, path in files.items() if path.stat().st_size > heaviest} == {}


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS], ids=lambda path: path.name)
def test_commands_that_pages_show_exist(path):
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    known |= {group.name for group in app.registered_groups}
    text = path.read_text(encoding="utf-8")
    fenced = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    shown = re.findall(r"^attnlab (\S+)", fenced, re.MULTILINE) + re.findall(
        r"^    attnlab ([a-z]+) ", text, re.MULTILINE
    )
    assert set(shown) <= known


def test_what_the_table_of_analyses_names_is_there():
    modules = {path.stem for path in (ROOT / "src/attnlab/analysis").glob("[a-z]*.py")}
    named = set(re.findall(r"`(\w+)`", written("analyses").split("## Adding one")[0]))
    assert named <= modules
    assert set(ANALYSES) & set(MEASURED) <= named


@docs
def test_special_tokens_are_seen_on_the_site_and_nothing_of_them_is_an_element(site):
    for path in site.rglob("*.html"):
        assert not Text(path.read_text(encoding="utf-8")).elements & {"s", "unk", "pad", "cls", "sep"}, path
    for page in ("tasks/classification", "tasks/synthetic", "results", "reference/tasks"):
        seen = "".join(Text((site / f"{page}.html").read_text(encoding="utf-8")).seen)
        assert "</s>" in seen, page


def test_tokens_in_written_pages_are_code_wherever_they_are_read():
    """Other readers of Markdown than our site take <s> for HTML."""
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS):
        text = re.sub(r"^ *```.*?^ *```|^    .*?$|`[^`]*`", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
        assert not re.search(r"</?(?!details>|summary>)[a-z]+>", text), path.name


@docs
def test_folds_of_a_page_are_folds_of_the_site(site):
    for name in ("results", "conclusions"):
        content = (site / f"{name}.html").read_text(encoding="utf-8")
        assert content.count("<details") == content.count("<summary>") == written(name).count("<details>") > 4
        assert "&lt;details" not in content
    assert "<details" in (site / "mechanisms" / "coda.html").read_text(encoding="utf-8")


def test_every_picture_has_an_alternative_text():
    for path in (ROOT / "README.md", *DOCS):
        for text, target in re.findall(r"!\[(.*?)\]\(([^)]*)\)", path.read_text(encoding="utf-8")):
            assert len(text) >= 30, (path.name, target)


@pytest.mark.browser
def test_search_works_from_a_folder_without_a_network(site, chromium):
    page, asked = chromium.new_page(), []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((site / "tour.html").as_uri())
    page.locator("input.md-search__input").click()
    page.keyboard.type("entropy")
    page.wait_for_function("() => document.querySelectorAll('.md-search-result__item').length > 2", timeout=10_000)
    page.close()
    assert [url for url in asked if not url.startswith("file:")] == []


@docs
def test_the_reference_has_what_pages_speak_of(site):
    seen = "".join(
        "".join(Text(path.read_text(encoding="utf-8")).seen) for path in (site / "reference").rglob("*.html")
    )
    for name in ("record_of", "unpack_view", "ViewGold", "TaskConfig", "TrainConfig", "open_run", "resolve_recipe",
                 "configure_model", "record_probes", "jsd", "open_reader", "shuffled_baseline", "Recipe"):  # fmt: skip
        assert name in seen, name


def test_the_viewer_s_page_names_every_key_of_the_json():
    record = attnlab.record(build(PRESETS["tiny"]).eval(), torch.tensor([[3, 4, 5]]))
    document, page = pack_view(attnlab.show(record).view), written("viewer").split("## The JSON")[1]
    run, example = document["runs"][0], document["examples"][0]
    attention = run["frames"][0]["attentions"][0]
    parts = document, run, run["frames"][0], attention, attention["maps"]["weight"], example, example["sides"]["target"]
    for key in {key for part in parts for key in part}:
        assert f'"{key}"' in page, key


@docs
def test_the_example_of_a_new_task_trains(tmp_path, monkeypatch):
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Add a task")[1]
    block = re.search(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    space = {"__name__": "reverse"}
    module = type(sys)("reverse")
    monkeypatch.setitem(sys.modules, "reverse", module)  # dataclasses look their module up
    exec(compile(block[1], "CONTRIBUTING.md", "exec"), space)
    module.__dict__.update(space)
    monkeypatch.setitem(TASKS, "reverse", space["Reverse"])
    monkeypatch.chdir(tmp_path)
    small = "width=16 layers=1 heads=2 feed_forward=16 batch_examples=5 steps=3 types=7 out=run"
    result = CliRunner().invoke(app, ["train", "reverse", *small.split()])
    assert result.exit_code == 0, (result.output, result.exception)
    batch = space["Reverse"](space["ReverseConfig"](length=5)).make_batch("valid", [3, 4])
    assert torch.equal(batch.targets[:, :5], batch.inputs[0][:, :5].flip(1))


@docs
def test_the_example_of_a_new_analysis_measures_what_it_says():
    space = {}
    for block in re.findall(r"^```python\n(.*?)^```", written("analyses"), re.MULTILINE | re.DOTALL):
        exec(compile(block, "analyses.md", "exec"), space)
    record = attnlab.record(build(PRESETS["tiny"]).eval(), torch.randint(1, 256, (1, 5)))
    found, weights = space["distance"](record)["distance_tokens"][0], record.layers[0].weights[0, 0]
    assert found == pytest.approx(sum(float(weights[i, j]) * abs(i - j) for i in range(5) for j in range(5)) / 5)


@docs
def test_links_between_pages_lead_to_a_page_and_a_heading(made):
    texts = {path.name: path.read_text(encoding="utf-8") for path in DOCS}
    texts |= {name: page for name, page in made.items() if name.endswith(".md")}
    for name, text in texts.items():
        for target, anchor in re.findall(r"(?<!!)\[[^\]]+\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", text):
            there = (Path("/") / Path(name).parent / (target or Path(name).name)).resolve().relative_to("/").as_posix()
            assert there in texts or (ROOT / "docs" / there).exists(), f"{name}: {target}"
            assert not anchor or anchor in anchors(texts[there]), f"{name}: {target}#{anchor}"


@docs
def test_the_tour_can_be_walked(tmp_path, monkeypatch):
    import tiny_models

    monkeypatch.chdir(tmp_path)
    space = {}
    for language, block in re.findall(r"^```(sh|python)\n(.*?)^```", (ROOT / "docs/tour.md").read_text(), re.M | re.S):
        if language == "python":
            exec(compile(block, "tour.md", "exec"), space)
            continue
        for line in block.splitlines():
            line = line.replace("sentence-transformers/all-MiniLM-L6-v2", tiny_models.minilm())
            typed, _, line = line.rpartition(" | ")
            words = [re.sub(r"^steps=\d+", "steps=3", word) for word in shlex.split(line, comments=True)[1:]]
            if words[0] != "reproduce":  # the studies' own tests run them
                result = CliRunner().invoke(app, words, input=" ".join(shlex.split(typed)[1:]))
                assert result.exit_code == 0, (words, result.output, result.exception)
    for page in ("tour", "cat"):
        assert (tmp_path / "inspected" / page / "report.html").exists()
    assert "nurabu" in (tmp_path / "inspected/tour/examples/1/layers.csv").read_text(), "ids in the place of words"


@docs
@pytest.mark.parametrize("name", ["record", "interventions", "attribution"])
def test_the_examples_of_interventions_attribution_and_a_notebook_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = written(name).split("## In a notebook")[-1]
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(compile(block, f"{name}.md", "exec"), {})
    assert name != "record" or {"attention.html", "record.npz"} <= {path.name for path in tmp_path.iterdir()}
    assert name != "record" or len([line for line in block.splitlines() if line]) <= 30
