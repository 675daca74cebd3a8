"""The page: whole in itself, and what comes from data stays text."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from importlib.resources import files

import torch

from attnlab.report.bundle import join_scripts
from attnlab.report.colours import NEGATIVE, POSITIVE, choose_colormap
from attnlab.report.figures import draw_attention_maps, draw_curves, draw_seed_curves, render_files, render_png
from attnlab.report.page import Command, Facts, Files, Picture, Table, Text, render_page
from attnlab.terminal import Bar

HOSTILE = "\"><img onerror='alert(1)' src=x><script>alert(2)</script>"


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.sources, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.sources += [value for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data):
        self.text += data


def test_hostile_text_stays_text():
    picture = Picture(render_png(draw_curves({HOSTILE: ([0, 1], [0, 1])}, x="x", y="y")), HOSTILE)
    table = Table([HOSTILE], [[HOSTILE], ["reproduced"]], verdicts=HOSTILE)
    parts = [table, picture, Text(HOSTILE), Command(HOSTILE), Facts({HOSTILE: HOSTILE})]
    tags = Tags(render_page(HOSTILE, [(HOSTILE, parts), ("b", []), ("c", [])]))
    assert tags.tags.count("script") == 1  # the page's own
    assert tags.tags.count("img") == 1
    assert (
        tags.text.count(HOSTILE) == 11
    )  # title, headings, contents, cells, caption, text, command, both sides of a fact
    assert all(source.startswith(("data:", "#section-")) for source in tags.sources)


def test_the_policy_names_the_script_and_the_style_that_are_there():
    html = render_page("t", [("a", [Text("b")])])
    allowed = re.search(r'Content-Security-Policy\' content="([^"]*)"', html)[1]
    assert "default-src 'none'" in allowed
    for pattern in (r"<script type='module'>(.*?)</script>", r"<style>(.*?)</style>"):
        content = re.search(pattern, html, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in allowed


def test_modules_are_joined_each_once_and_after_what_they_need():
    joined = join_scripts(("viewer.js", "tables.js", "folds.js"))
    names = re.findall(r"^const (\w+_js) = \(\(\) => \{$", joined, re.MULTILINE)
    assert len(names) == len(set(names)) >= 10
    for name in names:
        needed = re.findall(r"\} = (\w+_js);$", joined.split(f"const {name} = ")[1].split("})();\n")[0], re.MULTILINE)
        assert all(names.index(other) < names.index(name) for other in needed)
    assert not re.search(r"^(import|export) ", joined, re.MULTILINE)
    assert "</script" not in joined.lower()
    modules = {path.name for path in files("attnlab.report").joinpath("viewer").iterdir() if path.suffix == ".js"}
    assert {name.replace("_js", ".js") for name in names} == modules - {"theme.js"}


def test_no_script_reads_html_or_asks_the_network():
    text = join_scripts(("theme.js", "tables.js", "viewer.js"))
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "fetch(", "XMLHttpRequest"):
        assert word not in text, word


def test_a_figure_is_drawn_for_pages_and_papers_the_same_each_time():
    drawn = [render_files(draw_curves({"日本 $x$": ([0, 1], [0, 1])}, x="x", y="y")) for _ in range(2)]
    assert drawn[0] == drawn[1]
    starts = {suffix: data[:5] for suffix, data in drawn[0].items()}
    assert starts == {".png": b"\x89PNG\r", ".svg": b"<?xml", ".pdf": b"%PDF-"}


def test_negative_weights_get_a_scale_that_is_zero_in_the_middle():
    maps = {"a": torch.tensor([[0.5, -0.25]]), "b": torch.tensor([[1.0, 0.0]])}
    figure = draw_attention_maps(maps, ["x"], ["y", "z"])
    for axis in figure.axes[:2]:
        assert axis.images[0].get_clim() == (-1.0, 1.0)
    positive = draw_attention_maps({"a": torch.tensor([[0.5, 0.25]])}, ["x"], ["y", "z"])
    assert positive.axes[0].images[0].get_clim() == (0.0, 0.5)


def test_figures_have_the_colours_of_the_viewer():
    """Blue above 0 and orange below, whatever on a page is looked at."""
    light = files("attnlab.report").joinpath("viewer", "colour.js").read_text(encoding="utf-8").split("dark: {")[0]
    for name, stops in (("positive", POSITIVE), ("negative", NEGATIVE)):
        assert tuple(re.findall(r"#\w{6}", re.search(rf"{name}: \[(.*?)\]", light)[1])) == stops
    below, above = (choose_colormap(signed=True)(x) for x in (0.1, 0.9))
    assert below[0] > below[2] + 0.2
    assert above[2] > above[0] + 0.2
    assert choose_colormap(signed=True)(1.0) == choose_colormap(signed=False)(1.0)
    signed = draw_attention_maps({"a": torch.tensor([[0.5, -0.25]])}, ["x"], ["y", "z"])
    assert signed.axes[0].images[0].get_cmap() == choose_colormap(signed=True)


def test_a_curve_of_one_point_is_seen():
    drawn = [
        draw_curves({"a": ([7], [0.5])}, x="x", y="y"),
        draw_seed_curves({"a": ([7], torch.rand(3, 1))}, x="x", y="y"),
    ]
    for figure in drawn:
        assert all(line.get_marker() not in ("", "None") for line in figure.axes[0].lines)


def test_files_beside_the_page_are_links_into_its_folder():
    html = Files({f"examples/1/{HOSTILE}.csv": HOSTILE, "javascript:alert(1)": "b"}).html()
    tags = Tags(html)
    assert tags.tags == ["ul", "li", "a", "li", "a"]
    assert all(source.startswith("./") and not set("<>'\"") & set(source) for source in tags.sources)
    assert tags.text.count(HOSTILE) == 2


def test_progress_is_told_in_lines_where_there_is_no_terminal(capsys, monkeypatch):
    clock = iter([0.0, 3.0, 12.0, 12.0, 15.0])
    monkeypatch.setattr("attnlab.terminal.time.monotonic", lambda: next(clock))
    with Bar(1) as bar:
        for done in (1, 2000, 3000):
            bar.tick(done, 5000, "examples")
    assert capsys.readouterr().err == "2,000 of 5,000  examples\n"
