"""Every page in a real browser: findings on top, sections that fold, no error, nothing wider than the window."""

import pytest
import test_compare_page
import test_study_page
import tiny_models

from attnlab.commands.compare.comparison_page import write_comparison
from attnlab.commands.diagnose import diagnose_files
from attnlab.commands.inspect.inspection import InspectionRequest, inspect
from attnlab.experiments.study_page import write_study

pytestmark = pytest.mark.browser
WIDTHS = (1280, 390)
OVERFLOW = "() => document.documentElement.scrollWidth - window.innerWidth"


def write_study_page(folder):
    make = test_study_page.contrast
    cells = [make("one", "a", (1.9, 2.0, 2.1)), make("one", "far", (-3.0, -4.0, -5.0)), test_study_page.unrun("one")]
    results = [test_study_page.result("one", *cells), test_study_page.result("two", test_study_page.unrun("two"))]
    return write_study(test_study_page.STUDY, "smoke", results, folder)


def write_comparison_page(folder):
    rows = {"softmax": (10.0, 20.0, 30.0), "coda": (4.9, 15.1, 25.0)}
    return write_comparison(test_compare_page.results(**rows), folder, {"command": "attnlab compare language"})


def write_diagnosis_page(folder):
    lines = [f"the {a} sees a {b} ." for a in ("cat", "dog", "bird") for b in ("mat", "tree", "hat", "fox")] * 3
    for side in ("src", "tgt"):
        (folder / side).write_text("\n".join(line if side == "src" else line.upper() for line in lines))
    out = folder / "out"
    diagnose_files(folder / "src", folder / "tgt", sentence=None, out=out, command="attnlab diagnose src tgt")
    return out / "report.html"


def write_inspection_page(folder):
    tiny_models.gpt2().save_pretrained(folder / "gpt2")
    tiny_models.tokenizer().save_pretrained(folder / "gpt2")
    request = InspectionRequest(model=str(folder / "gpt2"), text="the cat sat on the mat .")
    return inspect(request, folder / "out", device="cpu", command="attnlab inspect", progress=lambda *_: None)


PAGES = {
    "study": (write_study_page, "published numbers and directions"),
    "comparison": (write_comparison_page, "coda has the lowest log-perplexity"),
    "diagnosis": (write_diagnosis_page, "output words"),
    "inspection": (write_inspection_page, "the model expects"),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_was_found_and_folds_the_rest(name, tmp_path, opened):
    write, words = PAGES[name]
    page = opened(write(tmp_path))
    findings = page.locator(".findings li")
    assert 2 <= findings.count() <= 3
    assert words in page.locator(".findings").inner_text()
    folds = page.locator("section > details")
    assert folds.count() >= 2
    content = folds.first.locator(":scope > :not(summary)").first
    assert not content.is_visible()
    folds.first.locator("summary").first.click()
    assert content.is_visible()
    folds.first.locator("summary").first.click()
    assert not content.is_visible()
    last = page.locator("nav a").last
    last.click()
    assert folds.last.evaluate("(fold) => fold.open")
    page.locator("button.unfold").click()
    assert page.locator("section > details:not([open])").count() == 0
    assert page.locator("button.unfold").inner_text() == "fold all"
    text = page.locator("main").inner_text()
    assert not [word for word in ("nan", "norm_", "at_least", "encoder-self", "decoder-self") if word in text.split()]
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate(OVERFLOW) <= 0, width
    assert "“" not in page.locator("h1").inner_text()


@pytest.mark.parametrize("name", ["study", "inspection"])
def test_a_page_is_dark_where_the_reader_is(name, tmp_path, opened):
    page = opened(PAGES[name][0](tmp_path), color_scheme="dark")
    ground = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, ground.removeprefix("rgb(").removesuffix(")").split(","))) < 120
    page.emulate_media(color_scheme="light")
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_masked_cells_are_grey_in_the_viewer(tmp_path, opened):
    page = opened(write_inspection_page(tmp_path)).ready()
    assert page.pixel(0, 6)[:3] == [0xE9, 0xEC, 0xF1]
    assert page.pixel(6, 0)[:3] != [0xE9, 0xEC, 0xF1]
    assert "word read (attending)" in page.locator(".texts").inner_text()
