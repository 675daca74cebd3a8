"""Any text in a real browser: hostile tokens stay text; every script, long tokens and long texts are shown."""

import csv
import io
import json
import re
from dataclasses import replace

import pytest
import torch
from small_models import LM, made

import attnlab
from attnlab.experiments.verdicts import VERDICTS
from attnlab.reading.maps import show
from attnlab.report.page import Command, Facts, Table, Text, render_page
from attnlab.report.view import Frame, View, ViewAttention, ViewExample, ViewRun, ViewSide
from attnlab.report.viewer_html import Viewer

HOSTILE = [
    "<script>alert(1)</script>", "\"><img src=x onerror=alert(2)>", "</script><script>alert(3)</script>", "<!--",
    "'); alert(4); ('", "&lt;b&gt;", "${alert(5)}", "javascript:alert(6)", "a\u2028b", "\u202eevil", "]]>",
    "\\u003cscript>",
]  # fmt: skip
SCRIPTS = ["שלום", "مرحبا", "日本語", "한국어", "👩‍👩‍👧‍👦", "🇺🇳", "e\u0301", "ไทย", "x" * 3000, "", " ", "\n"]


def record_of(tokens):
    found = attnlab.record(made(LM), torch.randint(1, 23, (1, len(tokens))))
    return replace(found, words={"target": [tokens]}, meta={"model": tokens[0], "mechanism": tokens[1]})


def view_of(tokens, weights, title="view"):
    """One layer over these tokens; weights (h,n,n)."""
    side = ViewSide(tuple(tokens), tuple(range(len(tokens))), tuple(tokens))
    layer = ViewAttention(0, "encoder-self", 0, tuple(range(len(weights))), {"weight": weights})
    return Viewer(View(title, [ViewExample("1", {"source": side})], [ViewRun("run", [Frame([layer])])]))


def test_hostile_tokens_stay_text(opened, tmp_path):
    record = record_of(HOSTILE)
    viewer = show(
        {HOSTILE[0]: record, HOSTILE[1]: record}, title=HOSTILE[2], curves={HOSTILE[0]: {HOSTILE[1]: ([0, 1], [0, 1])}}
    )
    page = opened(viewer.save(tmp_path / "hostile.html")).ready()
    chips = page.locator(".tokens").first.locator(".token")
    shown = chips.all_inner_texts()
    assert shown[:8] == HOSTILE[:8]
    assert shown[8:10] == ["a⏎b", "·evil"]  # what would break a line or turn it round is marked
    assert [chips.nth(n).get_attribute("title") for n in range(12)] == [
        f"{n}: {text}" for n, text in enumerate(HOSTILE)
    ]
    for n in range(len(HOSTILE)):
        page.click(n, n)
        assert page.locator(".pair .name").first.get_attribute("title") == HOSTILE[n]
    page.get_by_label("arcs").check()
    page.ready()
    assert page.get_by_label("Run").locator("option").all_inner_texts() == HOSTILE[:2]
    assert page.title() == HOSTILE[2]
    assert page.locator("script").count() == 2  # the page's own, and its data
    assert page.locator("img").count() == 0


def test_what_is_injected_all_the_same_cannot_run(opened, tmp_path):
    """A second wall: even markup that got in is stopped by the page's policy."""
    path = view_of(["a", "b"], torch.rand(1, 2, 2)).save(tmp_path / "policy.html")
    page = opened(path).ready()
    run = page.evaluate(
        """() => {
            const script = document.createElement('script');
            script.textContent = 'window.broken = true';
            document.body.append(script);
            const image = '<img src="data:image/png;base64,AAAA" onerror="window.broken = true">';
            document.body.insertAdjacentHTML('beforeend', image);
            return new Promise((done) => setTimeout(() => done(window.broken === true), 200));
        }"""
    )
    assert run is False
    assert len(page.said) >= 2
    assert all("Content Security Policy" in line for line in page.said)
    page.said.clear()


def test_every_script_and_long_tokens_are_shown(opened, tmp_path):
    page = opened(show(record_of(SCRIPTS)).save(tmp_path / "scripts.html")).ready()
    chips = page.locator(".tokens").first.locator(".token")
    assert chips.all_inner_texts()[:9] == SCRIPTS[:9]
    assert chips.all_inner_texts()[9:] == ["∅", "␣", "⏎"]
    assert chips.nth(0).evaluate("(x) => getComputedStyle(x).direction") == "rtl"
    assert chips.nth(2).evaluate("(x) => getComputedStyle(x).direction") == "ltr"
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")  # nothing is pushed off the page
    for view in ("arcs", "matrix"):
        page.get_by_label(view).check()
        page.ready()
    page.click(8, 0)
    assert page.locator(".pair .name").first.inner_text() == SCRIPTS[8]
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert page.locator(".readout").bounding_box()["height"] < 900


def test_512_tokens_open_and_uniform_attention_is_exact(opened, tmp_path):
    uniform = torch.full((512, 512), 1 / 512)
    local = torch.eye(512) * 0.5 + uniform / 2
    tokens = [f"token{n}" for n in range(512)]
    page = opened(view_of(tokens, torch.stack([uniform, local])).save(tmp_path / "long.html")).ready()
    for query, key in ((0, 0), (300, 17), (511, 511)):
        page.point(query, key)
        assert page.locator(".readout > .values .value").inner_text() == "0.00195"
    page.keyboard.press("m")
    page.ready()
    page.get_by_role("button", name="1", exact=True).click()
    page.get_by_label("matrix").check()
    page.point(300, 300)
    assert page.value() == pytest.approx(0.5 + 1 / 1024, rel=0.01)
    assert page.locator(".tokens").first.locator(".token").count() == 512


def test_an_example_of_one_token(opened, tmp_path):
    page = opened(view_of(["one"], torch.ones(1, 1, 1)).save(tmp_path / "one.html")).ready()
    page.point(0, 0)
    assert page.value() == 1


def test_a_notebook_shows_it_in_a_frame(opened):
    page = opened()
    viewer = view_of(HOSTILE, torch.rand(2, 12, 12))
    page.set_content(f"<h1>a notebook</h1>{viewer._repr_html_()}")
    frame = page.frame_locator("iframe")
    frame.locator(".viewer[data-ready]").wait_for()
    assert frame.locator(".tokens").first.locator(".token").first.inner_text() == HOSTILE[0]
    assert page.locator("script").count() == 0


def test_a_viewer_that_opens_hidden_is_drawn_when_it_is_shown(opened):
    page = opened()
    frame = view_of(["one", "two"], torch.eye(2)[None])._repr_html_()
    page.set_content(f"<button onclick='nextSibling.hidden ^= 1'>fold</button><div hidden>{frame}</div>")
    viewer = page.frame_locator("iframe").locator(".viewer[data-ready]")
    viewer.wait_for(state="attached")
    assert viewer.locator(".over").count() == 0
    for state in ("visible", "hidden", "visible"):
        page.get_by_role("button", name="fold").click()
        viewer.locator(".over").wait_for(state=state)
    assert viewer.locator(".over").bounding_box()["width"] > 100


def test_a_panel_may_be_narrower_than_its_labels(opened, tmp_path):
    page = opened(view_of(["a long token"] * 40, torch.rand(1, 40, 40)).save(tmp_path / "narrow.html")).ready()
    page.locator(".main").evaluate("(x) => { x.style.width = '60px' }")
    page.locator(".panel[style*='width: 58px']").wait_for()
    assert page.locator(".over").bounding_box()["width"] > 60  # labels, and beside them still a map


# --- the page around it ---


ROWS = [
    ["b", "1,234", "0.5 ± 0.1", "reproduced", "[−0.1, 1,000]", "12 %", "1 %"],
    ['a,"q"', "−7", "0.25 ± 0.2 (2 of 3 seeds)", "not run", "[10, 11]", "0.3", "–"],
    ["c_%", "–", "10", "x", "[2, 3e-5]", "–", "2 %"],
]
STUB = "navigator.clipboard.writeText = async (text) => { window.copied = text }"


@pytest.fixture
def report(tmp_path):
    table = Table(["name", "n", "value", "verdict", "range", "mixed", "share"], ROWS, verdicts="verdict")
    parts = [table, Facts({HOSTILE[0]: [1, 2], "seeds": (0, 1)}), Text(HOSTILE[1]), Command(HOSTILE[2])]
    (tmp_path / "report.html").write_text(
        render_page("t", [("one", parts), ("two", []), ("three", [])]), encoding="utf-8"
    )
    return tmp_path / "report.html"


def column(page, number):
    return page.locator(f"tbody td:nth-child({number})").all_inner_texts()


def test_tables_are_sorted_by_mouse_and_keyboard(opened, report):
    page = opened(report)
    page.get_by_role("button", name="n", exact=True).click()
    assert column(page, 2) == ["−7", "1,234", "–"]  # what is no number comes last
    page.get_by_role("button", name="n", exact=True).press("Enter")
    assert column(page, 2) == ["1,234", "−7", "–"]
    assert page.locator("th").nth(1).get_attribute("aria-sort") == "descending"
    page.get_by_role("button", name="value").click()
    assert column(page, 3) == ["0.25 ± 0.2 (2 of 3 seeds)", "0.5 ± 0.1", "10"]
    page.get_by_role("button", name="name").click()
    assert column(page, 1) == ['a,"q"', "b", "c_%"]
    page.get_by_role("button", name="range").click()
    assert column(page, 5) == ["[−0.1, 1,000]", "[2, 3e-5]", "[10, 11]"]  # by the low end


def copied(opened, path, form):
    """What the button puts into the clipboard."""
    page = opened()
    page.add_init_script(STUB)
    page.goto(path.as_uri())
    page.asked.clear()
    page.get_by_role("button", name=f"copy {form}").click()
    page.get_by_text("copied").wait_for()
    return page.evaluate("copied")


def test_csv_has_numbers_as_they_are_and_each_in_a_column(opened, report):
    """No commas in thousands, no typographic minus; ±, bounds and remarks beside them; a unit of all in the title."""
    lines = list(csv.reader(io.StringIO(copied(opened, report, "CSV"))))
    assert lines == [
        ["name", "n", "value", "value ±", "value note", "verdict", "range low", "range high", "mixed", "share (%)"],
        ["b", "1234", "0.5", "0.1", "", "reproduced", "-0.1", "1000", "12 %", "1"],
        ['a,"q"', "-7", "0.25", "0.2", "2 of 3 seeds", "not run", "10", "11", "0.3", ""],
        ["c_%", "", "10", "", "", "x", "2", "3e-5", "–", "2"],
    ]


LATEX = {
    r"50 % & \$x$_1 ~ {a}^b #": r"50 \% \& \textbackslash{}\$x\$\_1 \textasciitilde{} \{a\}\textasciicircum{}b \#",
    "∂θ̂/∂τ, eq. 54": r"$\partial \hat{\theta}$/$\partial \tau$, eq. 54",
    "error ∝ 1/|O|": r"error $\propto$ 1/$|$O$|$",
    "A(α, β^uf) − Â": r"A($\alpha$, $\beta$\textasciicircum{}uf) $-$ Â",
    "‖Σαf(x)‖ ± 10⁻³": r"$\|\Sigma \alpha$f(x)$\|$ $\pm$ 10${}^{-3}$",
    "to predict <s> – and …": r"to predict $<$s$>$ -- and \ldots{}",
    "ŷ = x̂₁ ≥ 0": r"ŷ = $\hat{x}{}_{1}$ $\geq$ 0",
    "naïve e\u0301": "naïve é",
    "%\u0301 50, &\u0302": r"\% 50, \&",
    "[CLS] [SEP]": "{}[CLS] [SEP]",
    " * best": "{} * best",
}


def test_latex_is_what_pdflatex_sets(opened, tmp_path):
    """Signs that it does not know as letters become commands; what no command can set is named."""
    table = Table(["text"], [[text] for text in LATEX])
    (tmp_path / "a.html").write_text(render_page("t", [("", [table])]), encoding="utf-8")
    lines = copied(opened, tmp_path / "a.html", "LaTeX").splitlines()
    assert lines[:3] == [r"% \usepackage{booktabs}", r"\begin{tabular}{l}", r"\toprule"]
    assert lines[5:-2] == [rf"{want} \\" for want in LATEX.values()]
    assert all(ord(sign) < 0x180 for sign in "".join(lines))
    outside = [re.sub(r"\$[^$]*\$", "", line.replace(r"\$", "")) for line in lines]
    assert not any(re.search("[<>|]", line) for line in outside)


def test_latex_says_which_signs_need_another_font(opened, tmp_path):
    table = Table(["text", "n"], [["日本 α", "1"], ["b", "2 ± 1"]])
    (tmp_path / "a.html").write_text(render_page("t", [("", [table])]), encoding="utf-8")
    lines = copied(opened, tmp_path / "a.html", "LaTeX").splitlines()
    assert lines[1] == "% use xelatex or lualatex with a font that has 日 本"
    assert lines[2] == r"\begin{tabular}{lr}"


@pytest.mark.parametrize("width", [1280, 320])
def test_no_word_and_no_number_of_a_table_is_broken(opened, tmp_path, width):
    """A wide table scrolls in its own box, the page does not."""
    names = ["attention", "parameters", *(f"measure number {n}" for n in range(9))]
    row = ["permutations of two sets", "21,384", *["0.1607 ± 0.0012"] * 9]
    long = ["one", "2", *["a remark of some words that is broken between them, never inside of one"] * 9]
    (tmp_path / "a.html").write_text(
        render_page("t", [("", [Table(names, [row]), Table(names, [long])])]), encoding="utf-8"
    )
    found = opened(tmp_path / "a.html")
    found.set_viewport_size({"width": width, "height": 800})
    assert found.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    broken = found.evaluate(BROKEN)
    assert broken == []
    assert found.locator("td", has_text="0.1607").first.bounding_box()["height"] < 40


BROKEN = """() => {
    const lines = [];
    const walker = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        for (const { index, 0: word } of node.data.matchAll(/[^\\s-]+/g)) {
            const range = document.createRange();
            range.setStart(node, index);
            range.setEnd(node, index + word.length);
            if (new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size > 1) lines.push(word);
        }
    }
    return lines;
}"""


def test_verdicts_facts_and_theme(opened, report):
    page = opened(report, color_scheme="dark")
    assert page.locator(".verdict").all_inner_texts() == ["reproduced", "not run"]
    assert page.locator("dt").first.inner_text() == HOSTILE[0]
    assert page.locator("dd").all_inner_texts() == ["1, 2", "0, 1"]
    grounds = [page.evaluate("() => getComputedStyle(document.body).backgroundColor")]
    for _ in range(2):
        page.get_by_role("button", name="theme").click()
        grounds.append(page.evaluate("() => getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(14, 19, 26)", "rgb(255, 255, 255)", "rgb(14, 19, 26)"]
    assert page.get_by_role("link").all_inner_texts() == ["one", "two", "three"]


CONTRAST = """() => {
    const seen = (c) => c.match(/[\\d.]+/g).map(Number);
    const light = (c) => { const x = c / 255; return x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4; };
    const bright = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
    const ground = (node) => {
        for (; node; node = node.parentElement) {
            const c = seen(getComputedStyle(node).backgroundColor);
            if (c.length < 4 || c[3] > 0) return c;
        }
        return [255, 255, 255];
    };
    const told = [...document.querySelectorAll('body *:not(script)')].filter((x) =>
        x.checkVisibility() && [...x.childNodes].some((n) => n.nodeType === 3 && n.data.trim()));
    return told.map((x) => {
        const [a, b] = [bright(seen(getComputedStyle(x).color)), bright(ground(x))];
        return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), `${x.className}: ${x.textContent.slice(0, 20)}`];
    });
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_text_is_read_well_on_its_ground(opened, tmp_path, theme):
    """WCAG AA: a contrast of 4.5."""
    table = Table(["a", "verdict"], [[1, verdict] for verdict in VERDICTS], verdicts="verdict")
    viewer = Viewer(show(record_of(SCRIPTS)).view)
    text = render_page("t", [("one", [table, Facts({"a": 1}), viewer])])
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    opened_page = opened(tmp_path / "page.html", color_scheme=theme).ready()
    opened_page.click(3, 2)
    poor = [found for found in opened_page.evaluate(CONTRAST) if found[0] < 4.5]
    assert poor == []


def test_every_control_has_a_name(opened, tmp_path):
    page = opened(show(record_of(SCRIPTS)).save(tmp_path / "names.html")).ready()
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll('button, select, input, canvas[tabindex], img, svg')].filter((x) =>
            !(x.getAttribute('aria-label') || x.textContent.trim() || x.labels?.[0]?.textContent.trim()))
            .map((x) => x.outerHTML.slice(0, 80))"""
    )
    assert unnamed == []


def test_the_document_in_the_page_is_json(tmp_path):
    text = show(record_of(HOSTILE)).page()
    inside = text.split("<script type='application/json'>")[1].split("</script>")[0]
    assert json.loads(inside)["examples"][0]["sides"]["target"]["tokens"] == HOSTILE
