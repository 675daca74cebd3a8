"""What is marked in the viewer, by mouse and keyboard: locks, selections, the best head; arcs, labels, room."""

import pytest
import torch

from attnlab.reading.best_head import find_best_head
from attnlab.reading.maps import name_model
from attnlab.report.view import Best, Frame, View, ViewAttention, ViewExample, ViewGold, ViewRun, ViewSide
from attnlab.report.viewer_html import Viewer

SOURCE = ["un", "##believ", "##able", "cat", "s"]
PIECES = ViewSide(tuple(SOURCE), (0, 0, 0, 1, 2), ("unbelievable", "cat", "s"))
TARGET = ViewSide(("<s>", "le", "chat"), (0, 1, 2), ("<s>", "le", "chat"))
GOLD = ViewGold(frozenset({(1, 1)}), frozenset({(0, 0)}), (0, 1, -1), (0, 0, 0, 1, 2), 3)


def cross(layer, heads):
    """A cross attention whose heads have these keys for the three rows."""
    weights = torch.full((len(heads), 3, 5), 0.1)
    for head, keys in enumerate(heads):
        weights[head, range(3), keys] = 0.6
    return ViewAttention(0, "cross", layer, tuple(range(len(heads))), {"weight": weights})


def saved(path, *, best=None, gold=GOLD, curves=None, step=None):
    """Two runs of two layers of two heads; the second head of the second layer links words as the gold does."""
    example = ViewExample("1", {"source": PIECES, "target": TARGET}, gold)
    frame = Frame([cross(0, [[4, 4, 4], [3, 0, 0]]), cross(1, [[4, 0, 0], [1, 3, 4]])], step)
    runs = [ViewRun(name, [frame], curves or {}, best and best[name]) for name in ("a", "b")]
    return Viewer(View("marks", [example], runs)).save(path / "marks.html")


@pytest.fixture
def marked(opened, tmp_path):
    return opened(saved(tmp_path)).ready()


# --- keyboard ---


FOCUSED = "(selector) => document.activeElement.matches(selector)"


def test_the_keyboard_stays_on_the_map_when_the_view_changes(marked):
    marked.locator(".over").focus()
    for view in (".arcs canvas", ".over", ".arcs canvas"):
        marked.keyboard.press("m")
        marked.ready()
        assert marked.evaluate(FOCUSED, view)
    marked.keyboard.press("ArrowDown")
    marked.keyboard.press("ArrowRight")
    assert marked.ready().locator(".pair .name").all_inner_texts() == ["<s>", "##believ"]


def test_what_is_said_follows_layer_head_and_lock(marked):
    status = marked.get_by_role("status")
    marked.locator(".over").focus()
    for keys, pair, place, weight in (
        (["ArrowDown"], "<s> to un", "layer 0, head 0", 0.1),  # a lock at the first cell
        (["ArrowRight"], "<s> to ##believ", "layer 0, head 0", 0.1),
        (["]", "."], "<s> to ##believ", "layer 1, head 1", 0.6),
    ):
        for key in keys:
            marked.keyboard.press(key)
        assert marked.ready().value() == pytest.approx(weight, rel=0.01)
        assert status.inner_text() == f"{pair}: weight α {marked.value():g}; {place}"
    marked.keyboard.press("Escape")
    marked.ready()
    assert status.inner_text() == "layer 1, head 1"


def test_the_small_maps_are_one_tab_stop_and_arrows_go_through_them(marked):
    stops = ".heads-grid button[tabindex='0']"
    assert marked.locator(".heads-grid button").count() == 4
    assert marked.locator(stops).count() == 1
    marked.locator(stops).focus()
    for key, place in (("ArrowRight", "0·1"), ("ArrowDown", "1·1"), ("ArrowLeft", "1·0"), ("ArrowUp", "0·0"),
                       ("End", "1·1"), ("ArrowDown", "1·1"), ("Home", "0·0"), ("ArrowDown", "1·0")):  # fmt: skip
        marked.keyboard.press(key)
        at = marked.evaluate(
            "() => { const { layer, head } = document.activeElement.dataset; return `${layer}·${head}` }"
        )
        assert at == place
    marked.keyboard.press("Enter")
    assert "layer 1, head 0" in marked.ready().caption()
    assert marked.locator(stops).count() == 1


# --- locks and selections ---


def test_a_lock_holds_while_the_pointer_goes_elsewhere(marked):
    marked.click(1, 0)
    locked = marked.locator(".readout").inner_text()
    marked.point(2, 4)
    assert marked.locator(".readout").inner_text() == locked
    marked.get_by_role("button", name="unlock").press("Enter")
    marked.point(2, 4)
    assert marked.locator(".pair .name").all_inner_texts() == ["chat", "s"]
    assert marked.evaluate(FOCUSED, ".over")  # the button is gone, the keyboard is on the map


def test_marks_go_from_tokens_to_words_and_back(marked):
    marked.click(1, 2)
    for key in (1, 3):
        marked.locator(".tokens").nth(1).locator(".token").nth(key).click(modifiers=["Control"])
    marked.get_by_label("words").check()
    assert marked.ready().locator(".pair .name").all_inner_texts() == ["le", "unbelievable"]
    assert marked.locator(".pair em").inner_text() == "locked"
    assert "all queries × 2 keys" in marked.locator(".sums h4").inner_text()
    marked.get_by_label("tokens", exact=True).check()
    assert marked.ready().locator(".pair .name").all_inner_texts() == ["le", "un"]
    assert "all queries × 4 keys" in marked.locator(".sums h4").inner_text()


def over(page, query, key):
    """What lies above a cell, as it is drawn: red, green, blue, opacity."""
    return page.evaluate(
        """([i, j]) => {
            const { plot } = document.querySelector('.viewer').viewer.panels[0];
            const context = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
            context.drawImage(plot.over, -Math.round(plot.x(j + 0.5)), -Math.round(plot.y(i + 0.5)));
            return [...context.getImageData(0, 0, 1, 1).data];
        }""",
        [query, key],
    )


def test_what_is_not_selected_fades_and_what_is_keeps_its_colour(marked):
    for key in (1, 2):
        marked.locator(".tokens").nth(1).locator(".token").nth(key).click(modifiers=["Control"])
    marked.locator(".tokens").first.locator(".token").nth(1).click(modifiers=["Control"])
    marked.mouse.move(2, 2)
    marked.ready()
    assert over(marked, 1, 1)[3] == over(marked, 1, 2)[3] == 0
    for query, key in ((0, 1), (1, 3), (2, 4)):
        red, green, blue, opacity = over(marked, query, key)
        assert min(red, green, blue) > 250  # the ground of the page
        assert opacity > 150
    marked.get_by_role("button", name="clear").press("Enter")
    assert over(marked.ready(), 0, 1)[3] == 0
    assert marked.evaluate(FOCUSED, ".over")


# --- the head that aligns best ---


def test_the_head_with_the_lowest_error_rate_is_found():
    example = ViewExample("1", {"source": PIECES, "target": TARGET}, GOLD)
    frame = Frame([cross(0, [[4, 4, 4], [3, 0, 0]]), cross(1, [[4, 0, 0], [1, 3, 4]])])
    found = find_best_head([example], [frame])
    assert (found.kind, found.layer, found.head) == ("cross", 1, 1)
    assert find_best_head([ViewExample("1", example.sides)], [frame]) is None


def test_the_viewer_opens_at_the_best_head_of_the_run_and_marks_it(opened, tmp_path):
    best = {"a": Best("cross", 1, 1, "aligns best"), "b": Best("cross", 0, 1, "aligns best")}
    page = opened(saved(tmp_path, best=best)).ready()
    assert "layer 1, head 1" in page.caption()
    assert page.locator(".heads .best").get_attribute("title") == "head 1: aligns best"
    assert page.locator(".heads-grid .best").get_attribute("aria-label").startswith("layer 1, head 1; aligns best")
    assert page.value("weight", ".aer") == 0
    page.get_by_label("Run").select_option("b")  # from the best of one to the best of the other
    assert "layer 0, head 1" in page.ready().caption()
    page.get_by_role("button", name="0", exact=True).click()
    page.ready().get_by_label("Run").select_option("a")
    assert "layer 0, head 0" in page.ready().caption()
    assert page.locator(".heads .best").count() == 0


def test_an_older_document_that_knows_no_best_head_is_shown(opened, tmp_path):
    path = saved(tmp_path)
    text = path.read_text(encoding="utf-8")
    assert text.count('"best":null,') == 2
    path.write_text(text.replace('"best":null,', ""), encoding="utf-8")
    page = opened(path).ready()
    page.get_by_label("Run").select_option("b")
    assert "layer 0, head 0" in page.ready().caption()
    assert page.locator(".best").count() == 0


def test_a_best_head_that_is_not_there_is_refused():
    run = ViewRun("a", [Frame([cross(0, [[0, 0, 0]])])], best=Best("cross", 0, 1, "none"))
    with pytest.raises(ValueError, match="run 'a' has no cross layer 0, head 1 at step None"):
        View("", [ViewExample("1", {"source": PIECES, "target": TARGET})], [run])


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("bert-base-uncased", "bert-base-uncased"),
        ("org/name", "org/name"),
        ("/a/b/mine", "mine"),
        ("./x/run-1/", "run-1"),
        ("runs/tuned/hugging_face", "tuned"),
        ("/root/.cache/huggingface/hub/models--org--some--name/snapshots/0a1b2c", "org/some--name"),
    ],
)
def test_a_model_has_its_own_name_or_that_of_its_folder(model, name):
    assert name_model(model) == name


# --- arcs, labels, room ---


def drawn(page, colour):
    """How many points of the first canvas have a colour, by hue: a test of red, green, blue."""
    return page.evaluate(
        f"""() => {{
            const canvas = document.querySelector('.arcs canvas') || document.querySelector('.plot canvas');
            const copy = document.createElement('canvas');
            [copy.width, copy.height] = [canvas.width, canvas.height];
            const context = copy.getContext('2d', {{ willReadFrequently: true }});
            context.drawImage(canvas, 0, 0);
            const {{ data }} = context.getImageData(0, 0, copy.width, copy.height);
            let count = 0;
            for (let k = 0; k < data.length; k += 4) {{
                const [r, g, b, a] = data.slice(k, k + 4);
                if (a > 200 && {colour}) count += 1;
            }}
            return count;
        }}"""
    )


GOLDEN, BLUE = "r > 180 && g < 60 && b > 70", "b > r + 40 && r < 170"


def test_arcs_have_the_gold_and_a_locked_cell_those_of_its_query(opened, tmp_path):
    page = opened(saved(tmp_path)).ready()
    page.click(1, 2)
    page.get_by_label("arcs").check()
    page.mouse.move(2, 2)
    page.ready()
    locked = drawn(page, BLUE)
    assert drawn(page, GOLDEN) > 50  # the sure link of the locked row
    page.keyboard.press("Escape")
    page.ready()
    assert drawn(page, BLUE) > locked > 100  # five arcs of the row, and not the one alone
    page = opened(saved(tmp_path, gold=None)).ready()
    page.get_by_label("arcs").check()
    page.ready()
    assert drawn(page, GOLDEN) == 0


def test_arcs_say_how_many_of_the_pairs_that_are_seen_have_none(opened, tmp_path):
    apart = (torch.arange(60) - torch.arange(60)[:, None]) % 60
    masks = [apart < 41, apart < 19]  # queries see as many keys each
    layers = [
        ViewAttention(0, "encoder-self", n, (0,), {"weight": (torch.rand(1, 60, 60) + 0.5) * mask}, mask=mask)
        for n, mask in enumerate(masks)
    ]
    black = {}
    for name, tokens in {"without": ("",) * 60, "labelled": tuple(f"t{n}" for n in range(60))}.items():
        side = ViewSide(tokens, tuple(range(60)), tokens)
        view = View("arcs", [ViewExample("1", {"source": side})], [ViewRun("run", [Frame(layers)])])
        page = opened(Viewer(view).save(tmp_path / f"{name}.html")).ready()
        black[name] = drawn(page, "r < 90 && g < 90 && b < 90")
    assert black["labelled"] - black["without"] > 400  # labels, although the cells are small
    page.get_by_label("arcs").check()
    note = page.ready().locator(".panel .note")
    assert note.inner_text().startswith("Arcs of the 1,500 strongest of 2,460 pairs.")
    page.locator(".tokens").first.locator(".token").first.click(modifiers=["Control"])
    assert "in the selection" in page.ready().locator(".panel .note").inner_text()
    page.get_by_label("1", exact=True).check()
    page.ready()
    assert not note.is_visible()  # 1,140 arcs are all that there are


@pytest.mark.parametrize("width", [1280, 400, 320])
def test_all_numbers_stay_in_their_panel_and_the_page_does_not_scroll_sideways(opened, tmp_path, width):
    small = {"weight": torch.full((1, 3, 5), 4.83e-5), "norm-layer": torch.full((1, 3, 5), 1.234e-7)}
    small |= {name: torch.full((1, 3, 5), -0.00432) for name in ("norm-block", "probe", "saliency")}
    layer = ViewAttention(0, "cross", 0, (0,), small)
    example = ViewExample("1", {"source": PIECES, "target": TARGET}, GOLD)
    run = ViewRun("run", [Frame([layer])], {"accuracy": ([0, 100], [0, 0.979])})
    page = opened(Viewer(View("v", [example], [run])).save(tmp_path / "a.html")).ready()
    page.set_viewport_size({"width": width, "height": 900})
    page.ready()
    for name in ("norm + residual + LN", "probe β", "saliency Δ"):
        page.get_by_role("button", name=name, exact=True).click()
    page.click(1, 2)
    page.locator(".tokens").first.locator(".token").nth(1).click(modifiers=["Control"])
    page.ready()
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    outside = page.evaluate(
        """() => {
            const box = document.querySelector('.readout').getBoundingClientRect();
            const inside = [...document.querySelectorAll('.readout *:not(.unseen)')].filter((x) => x.checkVisibility());
            return inside.filter((x) => x.getBoundingClientRect().right > box.right - 8).map((x) => x.textContent);
        }"""
    )
    assert outside == []
    if width == 1280:  # three maps of few keys beside each other, and the numbers stay in sight
        tops = [box["y"] for box in (page.locator(".panel").nth(n).bounding_box() for n in range(3))]
        assert len(set(tops)) == 1
        page.evaluate("() => document.querySelector('.panel:last-child').scrollIntoView({ block: 'end' })")
        assert page.locator(".readout .pair").bounding_box()["y"] >= 0


def test_the_curves_have_round_ticks(opened, tmp_path):
    page = opened(saved(tmp_path, curves={"accuracy": ([0, 37, 400], [0.02, 0.5, 0.979])})).ready()
    texts = page.locator(".training svg text:not(.at)").all_text_contents()
    steps = page.locator(".training svg .at").all_text_contents()
    assert texts == ["0", "0.25", "0.5", "0.75", "1"]
    assert steps == [str(step) for step in range(0, 401, 50)]


def test_a_curve_of_one_step_that_is_zero_has_one_tick_and_a_scale(opened, tmp_path):
    page = opened(saved(tmp_path, curves={"accuracy": ([30], [0])}, step=30)).ready()
    assert page.locator(".training svg text:not(.at)").all_text_contents() == ["0", "0.25", "0.5", "0.75", "1"]
    assert page.locator(".training svg .at").all_text_contents() == ["30"]
