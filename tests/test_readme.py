"""README and docs: what they show runs, what they link to is there."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import attnlab
from attnlab.cli import app
from attnlab.experiments.status import tabulate_status
from attnlab.studies import STUDIES, open_study

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_line_with_a_command_can_be_pasted(page):
    """What explains a command stands behind a #, or a shell would take it for arguments."""
    commands = re.findall(r"^ *((?:attnlab|python|torchrun|make) .*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    loose = [line for line in commands if re.search(r"(?<!\\) {2,}[^\s#\\]", line.split(" #")[0])]
    assert loose == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_site_can_show_equations_and_commands(page):
    """It has no renderer for LaTeX, and an indented block behind a list becomes a part of the last item."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert "$$" not in text
    assert re.findall(r"^(?:[-*]|\d+\.) .*\n(?: +\S.*\n)*\n {4}(?!```)\S.*", text, re.MULTILINE) == []


def test_the_readme_has_a_command_a_number_and_a_picture_by_line_40():
    top = "\n".join((ROOT / "README.md").read_text().splitlines()[:40])
    assert "make demo" in top
    assert re.search(r"\*\*[\d.]+", top)
    assert re.search(r"!\[.*\]\(docs/images/.*\.png\)", top)


RUN = [
    "mechanisms", "record", "contribution", "alignment", "probes", "agreement", "optimal", "diversity", "rank",
    "gradient", "inspect", "diagnose", "ibm1", "decoding", "hugging-face", "lstm", "population", "transformer",
    "viewer",
]  # fmt: skip


@pytest.mark.docs
@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in RUN)], ids=lambda page: page.name
)
def test_python_examples_run(page, tmp_path, monkeypatch):
    import tiny_models

    monkeypatch.chdir(tmp_path)
    space = {"hugging_face_model": tiny_models.gpt2()}
    if page.name == "viewer.md":  # records and gold links that a reader has
        record = attnlab.record(tiny_models.minilm(), "The cat sat on the mat.")
        length = record.layers[0].weights.shape[-1]
        space |= dict.fromkeys(("first", "second", "at_0", "at_100"), record)
        space |= {"sure": frozenset({(1, 1)}), "possible": frozenset(), "words": length}
        space |= dict.fromkeys(("rows", "keys"), tuple(range(length)))
    for block in blocks(page, "python"):
        block = block.replace("sentence-transformers/all-MiniLM-L6-v2", tiny_models.minilm())
        exec(compile(block, page.name, "exec"), space)


ELSEWHERE = {  # where the Python of the other pages is run, or why it is not
    "analyses": "test_docs", "attribution": "test_docs", "interventions": "test_docs", "own-mechanism": "test_docs",
    "tour": "test_docs", "ecosystem": "test_ecosystem_page", "export": "test_doc_commands",
    "reproduce": "test_own_files", "ledger": "below", "snell2021": "needs SST; test_snell_runs trains on made-up text",
}  # fmt: skip


def test_the_python_of_every_page_is_run():
    assert {page.stem for page in PAGES[2:] if blocks(page, "python")} == {*RUN, *ELSEWHERE}


@pytest.mark.docs
def test_the_examples_of_the_ledger_run(tmp_path):
    (tmp_path / "results").symlink_to(ROOT / "results")
    (tmp_path / "example.py").write_text("\n".join(blocks(ROOT / "docs" / "ledger.md", "python")), encoding="utf-8")
    done = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "[0, 1, 4]" in done.stdout or "square" in done.stdout, done.stdout


MINE = """
from attnlab.mechanisms.softmax import Softmax as Mine
"""


@pytest.mark.docs
def test_commands_run(tmp_path, monkeypatch):
    import tiny_models

    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    for name, words in (("corpus.de", ("das Haus", "das Buch")), ("corpus.en", ("the house", "the book"))):
        Path(name).write_text("".join(f"{line}\n" for line in words * 9))
    commands = [
        shlex.split(line, comments=True)[1:]
        for block in blocks(ROOT / "README.md", "sh")
        for line in block.splitlines()
        if line.startswith("attnlab ")
    ]
    assert len(commands) >= 5
    for words in commands:
        words = [re.sub(r"^steps=\d+", "steps=3", word) for word in words]
        words = [tiny_models.minilm() if word == "sentence-transformers/all-MiniLM-L6-v2" else word for word in words]
        words += ["--from", str(ROOT / "results")] if "--status" in words else []
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, (words, result.output, result.exception)


@pytest.mark.docs
def test_the_readme_says_how_many_cells_were_run():
    table, _ = tabulate_status([study for name in STUDIES if (study := open_study(name)).from_paper], ROOT / "results")
    total = dict(zip(table.columns, table.rows[-1], strict=True))
    said = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"The four papers print {total['numbers']} numbers, and {total['measured']} of them are measured" in said
    assert f"{total['run']} of {total['cells']:,} cells are run. Of these, {total['official']} have the paper's" in said
    assert f"{total['impossible']} more cannot be run here" in said


@pytest.mark.docs
def test_the_replication_page_is_what_its_results_say(monkeypatch):
    import runpy

    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    made = runpy.run_path(str(ROOT / "benchmarks" / "replication.py"))["render_page"](ROOT / "results" / "replication")
    assert (ROOT / "docs" / "replication.md").read_text(encoding="utf-8") == made, (
        "run: python benchmarks/replication.py"
    )


@pytest.mark.docs
def test_the_results_page_is_what_the_results_say(monkeypatch):
    import runpy

    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # as `python benchmarks/results.py` does
    made = runpy.run_path(str(ROOT / "benchmarks" / "results.py"))["render_page"]()
    assert (ROOT / "docs" / "results.md").read_text(encoding="utf-8") == made, "run: python benchmarks/results.py"
