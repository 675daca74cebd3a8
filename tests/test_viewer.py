"""The viewer in a real browser: what is chosen is shown, and the numbers are the Record's."""

from dataclasses import replace

import pytest
import tiny_models
import torch
from small_models import LM, TRANSLATOR, made

import attnlab
from attnlab.analysis.alignment import aer, choose_words
from attnlab.analysis.contribution import norms
from attnlab.analysis.words import pool_by_word
from attnlab.reading.maps import build_view, show
from attnlab.recording.probe import record_probes
from attnlab.report.view import ViewGold

WORDS = ["[CLS]", "un", "##bel", "##iev", "##able", "cat", "s", "##at", ".", "[SEP]", "end"]
ROWS, KEYS = (0, 0, 1, 2, 3, 4, -1), (0, 1, 2, 3, 4)  # words; the last row is of none
SPECIAL = 3  # keys from there on are special tokens
CELLS = [(0, 0), (3, 7), (10, 2), (6, 10)]


def bert_record():
    model = tiny_models.bert()
    found = attnlab.record(model, tiny_models.padded_batch(model))
    return replace(found, words={"source": [WORDS, WORDS, WORDS]})


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A page of three examples of a BERT, and its record."""
    record = bert_record()
    return show(record, title="encoder").save(tmp_path_factory.mktemp("viewer") / "encoder.html"), record


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    """A page of two attentions at three steps of their training, with probes, curves and a gold alignment."""
    torch.manual_seed(3)
    records = {name: {step: translated(name) for step in (0, 10, 30)} for name in ("softmax", "dagpam")}
    links = sorted(proposed(records["softmax"][30]))  # some are sure, some only possible, and one is missed
    missed = next((s, links[0][1]) for s in range(SPECIAL) if (s, links[0][1]) not in links)
    gold = ViewGold(frozenset({links[0], missed}), frozenset(links[1:3]), ROWS, KEYS, SPECIAL)
    curves = {name: {"accuracy": ([0, 10, 20, 30], [0.1, 0.2, 0.7, 0.9]), "agreement": ([0, 30], [0.3, 0.8])}
              for name in records}  # fmt: skip
    viewer = show(records, title="translator", gold=[gold], curves=curves, best={})
    return viewer.save(tmp_path_factory.mktemp("viewer") / "translator.html"), records, gold


def translated(name):
    """The record of one pair; what attends to what in its cross attentions is drawn at random."""
    source, target = torch.arange(4, 9)[None], torch.arange(4, 11)[None]
    record = record_probes(made(TRANSLATOR, name), (source, target), target)
    drawn = [
        replace(layer, attended=torch.randn(1, 3, 7, 5).double().softmax(-1)) if layer.kind == "cross" else layer
        for layer in record.layers
    ]
    return replace(record, layers=drawn)


def proposed(record, head=0):
    """The links that a head of the last cross attention draws."""
    choice, _ = choose_words(
        record.kind("cross")[1].weights[:, head], torch.tensor([ROWS]), torch.tensor([KEYS]), SPECIAL
    )
    return {(int(source), target) for target, source in enumerate(choice[0]) if source >= 0}


def close(shown, true, scale):
    """Within half a step of 255 (or signed 127) levels, and the three figures that are shown."""
    half = (abs(true) * scale) ** 0.5 / 127 + scale / (4 * 127**2)
    return abs(shown - true) <= half + 0.006 * abs(true)


# --- numbers ---


def test_the_numbers_that_are_shown_are_the_records(opened, encoder):
    path, record = encoder
    page = opened(path).ready()
    weights, head_norms = record.layers[0].weights[0, 0], norms(record.layers[0]).head[0, 0]
    for query, key in CELLS:
        page.point(query, key)
        assert close(page.value("weight"), float(weights[query, key]), float(weights[query].max()))
        assert close(page.value("norm"), float(head_norms[query, key]), float(head_norms[query].max()) * 3)
    assert page.locator(".pair .name").all_inner_texts() == ["s", "end"]


def test_measures_of_all_heads_are_beside_them(opened, encoder):
    path, record = encoder
    page = opened(path).ready()
    for name in ("norm ‖Σαf(x)‖", "norm + residual + LN", "rollout"):
        page.get_by_role("button", name=name, exact=True).click()
    page.point(3, 7)
    assert page.locator(".panel").count() == 5
    want = norms(record.layers[0]).layer[0]
    assert close(page.value("norm-layer"), float(want[3, 7]), float(want[3].max()))
    page.get_by_role("button", name="weight α", exact=True).click()
    page.ready()
    assert page.locator(".panel").count() == 4
    scales = page.locator(".scale-bar").all_inner_texts()
    assert len(set(scales)) == 1  # one scale for all, unless asked otherwise
    page.get_by_label("Colour", exact=True).select_option("values, own scales")
    page.ready()
    assert len(set(page.locator(".scale-bar").all_inner_texts())) == 4


def test_heads_together_are_their_mean_or_their_sum(opened, encoder):
    path, record = encoder
    page = opened(path).ready()
    page.get_by_role("button", name="2", exact=True).click(modifiers=["Shift"])
    page.point(3, 7)
    two = record.layers[0].weights[0, [0, 2]]
    assert page.value() == pytest.approx(float(two[:, 3, 7].mean()), abs=0.01)
    assert "mean of heads 0, 2" in page.caption()
    assert page.get_by_role("button", name="mean", exact=True).get_attribute("aria-pressed") == "true"
    page.get_by_role("button", name="sum", exact=True).click()
    page.point(3, 7)
    assert page.value() == pytest.approx(float(two[:, 3, 7].sum()), abs=0.02)
    page.get_by_role("button", name="all", exact=True).click()
    page.ready()
    assert "sum of all heads" in page.caption()


def test_words_are_sums_and_means_of_their_pieces(opened, encoder):
    path, record = encoder
    page = opened(path).ready()
    page.get_by_label("words").check()
    numbers = [0, 1, 1, 1, 1, 2, 3, 3, 4, 5, 6]
    want = pool_by_word(record.layers[0].weights[0, 0], numbers, numbers)
    for query, key in ((1, 3), (3, 1), (6, 6)):
        page.point(query, key)
        assert page.value() == pytest.approx(float(want[query, key]), abs=0.01)
    assert page.locator(".tokens").first.locator(".token").all_inner_texts() == [
        "[CLS]", "unbelievable", "cat", "sat", ".", "[SEP]", "end",
    ]  # fmt: skip


def test_sums_over_a_selection_of_tokens(opened, encoder):
    path, record = encoder
    page = opened(path).ready()
    weights = record.layers[0].weights[0, 0]
    page.keyboard.down("Shift")
    page.mouse.move(*page.at(2, 1))
    page.mouse.down()
    page.mouse.move(*page.at(4, 5))
    page.mouse.up()
    page.keyboard.up("Shift")
    page.ready()
    assert "3 queries × 5 keys" in page.locator(".sums h4").inner_text()
    shown = page.number(".sums .value")
    assert shown == pytest.approx(float(weights[2:5, 1:6].sum()), abs=0.02)
    page.get_by_role("listbox").nth(1).get_by_text("end", exact=True).click(modifiers=["Control"])
    page.ready()
    shown = page.number(".sums .value")
    assert shown == pytest.approx(float(weights[2:5][:, [1, 2, 3, 4, 5, 10]].sum()), abs=0.02)
    page.get_by_role("button", name="clear").click()
    page.ready()
    assert page.locator(".sums").is_hidden()


def test_the_error_rate_is_that_of_the_analysis(opened, translator):
    path, records, gold = translator
    page = opened(path).ready()
    assert any(len(proposed(record)) < 5 for record in records["softmax"].values())  # some chose a special token
    slider = page.get_by_label("training step")
    for place, step in enumerate((0, 10, 30)):
        slider.fill(str(place))
        for head in range(3):
            page.get_by_role("button", name=str(head), exact=True).click()
            page.ready()
            want = aer(proposed(records["softmax"][step], head), gold.sure, gold.possible)
            assert page.value("weight", ".aer") == pytest.approx(want, abs=6e-4)
    frames = page.evaluate("() => document.querySelector('.viewer').viewer.panels[0].data.gold")
    framed = {(f["j"], ROWS[f["i"]], f["sure"]) for f in frames}
    assert framed == {(*link, True) for link in gold.sure} | {(*link, False) for link in gold.possible}


# --- choosing ---


def test_layer_head_view_and_example_by_mouse(opened, encoder):
    path, record = encoder
    page = opened(path).ready()
    page.get_by_label("2", exact=True).check()
    page.get_by_role("button", name="1", exact=True).click()
    page.point(3, 7)
    assert "layer 2, head 1" in page.caption()
    want = record.layers[2].weights[0, 1]
    assert close(page.value(), float(want[3, 7]), float(want[3].max()))
    page.get_by_label("Example").select_option(index=1)
    page.point(3, 5)
    want = record.layers[2].weights[1, 1]
    assert close(page.value(), float(want[3, 5]), float(want[3].max()))
    page.get_by_label("arcs").check()
    page.ready()
    assert page.locator(".arcs canvas").count() == 2
    assert page.locator(".over").count() == 0


def test_layer_head_and_view_by_keyboard(opened, encoder):
    path, _ = encoder
    page = opened(path).ready()
    page.get_by_label("0", exact=True).focus()
    page.keyboard.press("ArrowRight")
    page.ready()
    assert "layer 1, head 0" in page.caption()
    page.keyboard.press("ArrowRight")  # the keyboard is still where it was
    page.keyboard.press(".")
    page.ready()
    assert "layer 2, head 1" in page.caption()
    page.keyboard.press("[")
    page.keyboard.press(",")
    page.ready()
    assert "layer 1, head 0" in page.caption()
    page.keyboard.press("m")
    page.ready()
    assert page.locator(".arcs").count() == 2
    page.keyboard.press("m")
    page.keyboard.press("w")
    page.ready()
    assert page.locator(".tokens").first.locator(".token").count() == 7


def test_a_cell_is_locked_moved_and_unlocked(opened, encoder):
    path, record = encoder
    page = opened(path).ready()
    page.click(3, 7)
    page.mouse.move(2, 2)
    page.ready()
    locked = page.value()
    assert page.locator(".pair em").inner_text() == "locked"
    page.locator(".over").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    page.ready()
    want = record.layers[0].weights[0, 0]
    assert close(page.value(), float(want[4, 6]), float(want[4].max()))
    assert page.value() != locked
    assert "able to s: weight α" in page.get_by_role("status").inner_text()
    page.keyboard.press("Escape")
    page.ready()
    assert page.locator(".pair .hint").is_visible()


def test_a_token_of_the_text_colours_the_others(opened, encoder):
    path, record = encoder
    page = opened(path).ready()
    queries, keys = page.get_by_role("listbox").all()
    queries.get_by_text("cat").click()
    page.mouse.move(2, 2)
    page.ready()
    row = record.layers[0].weights[0, 0, 5]
    dark = page.evaluate(
        "() => [...document.querySelectorAll('.tokens')[1].children].map((x) => "
        "getComputedStyle(x).backgroundColor.match(/\\d+/g).map(Number).reduce((a, b) => a + b))"
    )
    assert dark.index(min(dark)) == int(row.argmax())
    assert queries.get_by_text("cat").get_attribute("aria-selected") == "true"
    first = keys.get_by_text("[CLS]")
    first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.ready()
    assert keys.get_by_text("un", exact=True).get_attribute("aria-selected") == "true"
    assert page.value() == pytest.approx(float(record.layers[0].weights[0, 0, :, 1].sum()), abs=0.03)


def test_zooming_keeps_the_cells_and_fit_goes_back(opened, encoder):
    path, record = encoder
    page = opened(path).ready()
    before = page.at(3, 7)
    page.get_by_role("button", name="zoom in").click()
    page.ready()
    assert page.at(3, 7) != before
    page.point(5, 5)
    want = record.layers[0].weights[0, 0]
    assert close(page.value(), float(want[5, 5]), float(want[5].max()))
    page.get_by_role("button", name="whole map").click()
    page.ready()
    assert page.at(3, 7) == pytest.approx(before)


# --- the other parts ---


def test_the_overview_is_sorted_by_a_statistic_and_chooses(opened, encoder):
    path, record = encoder
    page = opened(path).ready()
    shown = [a for a in build_view(record).runs[0].frames[0].attentions if a.example == 0 and a.index is not None]
    page.get_by_label("Sort by").focus()
    for name, label in (("entropy", "entropy (nats)"), ("sink", "sink share"), ("norm", "mean norm Σ‖αf(x)‖")):
        page.get_by_label("Sort by").select_option(label)
        order = page.evaluate(
            "() => [...document.querySelectorAll('.heads-grid button')].map((b) => [+b.dataset.layer, +b.dataset.head])"
        )
        want = {(a.index, head): a.statistics[name][head] for a in shown for head in a.heads}
        assert order == [list(place) for place in sorted(want, key=lambda place: -want[place])]
    assert page.evaluate("() => document.activeElement.ariaLabel") == "Sort by"
    page.get_by_role("button", name="largest first").click()
    page.locator(".heads-grid button").first.click()
    page.ready()
    layer, head = min(want, key=lambda place: want[place])
    assert f"layer {layer}, head {head}" in page.caption()
    assert page.locator(".heads-grid button[aria-pressed='true']").count() == 1
    painted = page.evaluate("() => [...document.querySelectorAll('.heads-grid canvas')].every((c) => c.width === 11)")
    assert painted


def test_the_slider_shows_the_steps_of_the_training(opened, translator):
    path, records, _ = translator
    page = opened(path).ready()
    assert page.locator(".step").inner_text() == "step 30"
    assert page.locator(".training .line").count() == 2
    slider = page.get_by_label("training step")
    for step in (0, 10):
        slider.fill(str([0, 10, 30].index(step)))
        page.point(4, 2)
        want = records["softmax"][step].kind("cross")[1].weights[0, 0]
        assert page.locator(".step").inner_text() == f"step {step}"
        assert close(page.value(), float(want[4, 2]), float(want[4].max()))
    assert page.locator(".legend b").first.inner_text() == "0.2"
    slider.press("ArrowRight")
    page.ready()
    assert page.locator(".step").inner_text() == "step 30"
    page.get_by_label("Run").select_option("dagpam")
    page.point(4, 2)
    want = records["dagpam"][30].kind("cross")[1].weights[0, 0]
    assert close(page.value(), float(want[4, 2]), float(want[4].abs().max()))


def test_kinds_have_their_own_axes(opened, translator):
    path, records, _ = translator
    page = opened(path).ready()
    assert "target word read (attending)" in page.locator(".texts").inner_text()
    words = records["softmax"][30].tokens["target"][0].tolist()
    page.point(4, 2)
    assert page.locator(".writes").inner_text() == f"reads {words[4]}, writes {words[5]}"
    page.point(len(words) - 1, 2)  # what the last one writes is not known
    assert page.locator(".writes").count() == 0
    page.get_by_label("self-attention of the encoder").check()
    page.point(4, 3)
    want = records["softmax"][30].kind("encoder-self")[1].weights[0, 0]
    assert page.locator(".tokens").first.locator(".token").count() == 5
    assert close(page.value(), float(want[4, 3]), float(want[4].max()))
    assert page.locator(".aer").is_hidden()


def test_signed_weights_are_on_a_diverging_scale(opened, tmp_path):
    found = attnlab.record(made(LM, "dagpam"), torch.randint(1, 23, (1, 7)))
    layer = replace(found.layers[0], attended=torch.randn(1, 3, 7, 7).tril().double())
    page = opened(show(replace(found, layers=[layer])).save(tmp_path / "signed.html")).ready()
    weights = layer.weights[0, 0]
    low, high = (divmod(int(place), 7) for place in (weights.argmin(), weights.argmax()))
    assert float(weights[low]) < 0
    red, _, blue, _ = page.pixel(*low)
    assert red > blue + 20  # orange
    red, _, blue, _ = page.pixel(*high)
    assert blue > red + 20
    page.point(*low)
    assert close(page.value(), float(weights[low]), float(weights[low[0]].abs().max()))
    assert page.locator(".scale-bar").first.inner_text().startswith("−")
    hidden = page.pixel(0, 6)  # the future
    assert hidden != page.pixel(*low)
    assert hidden == page.pixel(1, 5)
