"""Read a text of any length: totals, strongest links, a level of blocks, and windows, instead of maps of all pairs.

The model runs once and each layer is reduced as it runs (attnlab.huggingface.streaming). What is kept:

    statistics   the tables heads and categories of `attnlab inspect`, exact; correlations over pairs are left out
    tokens       what each token receives and takes, over all heads and layers
    links        the pairs of different tokens with the largest ‖αf(x)‖ in each head, exact
    level        maps of blocks of B tokens, sums of all pairs
    windows      every weight among WINDOW consecutive tokens, at a few places or one after another
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from attnlab.analysis.categories import Categories
from attnlab.analysis.contribution_table import select_heads
from attnlab.analysis.sinks import tabulate_sinks
from attnlab.analysis.statistics import Statistics
from attnlab.analysis.totals import LEAST_BLOCK, Totals, measure_taken
from attnlab.analysis.words import join_pieces, number_words
from attnlab.config import check_known
from attnlab.huggingface import dispatch, inputs
from attnlab.huggingface.capture import describe_unrecorded
from attnlab.huggingface.intervening import find_sites
from attnlab.huggingface.streaming import Activations, StreamedLayer, stream_layers
from attnlab.mechanisms.mechanism import widen
from attnlab.reading.maps import HEAD_CELLS
from attnlab.reading.reader import PretrainedReader, TextReader
from attnlab.reading.text_stream import TextExample
from attnlab.records.record import KINDS
from attnlab.records.visibility import SoftmaxScores
from attnlab.report.view import Frame, View, ViewAttention, ViewExample, ViewRun, ViewSide

LONG = 1024  # tokens from which a text is read by totals
BLOCKS = 128  # largest number of blocks on a side of the level
WINDOW = 96  # tokens of a window
LINKS = 8  # strongest links of a head
PLACES = 6  # windows that are chosen if none is given

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, eq=False)
class LongReading:
    """What one pass over a long text gives."""

    tables: dict[str, pd.DataFrame]  # heads, categories, spearman (empty), sinks, links, tokens, activations
    unrecorded: str  # which layers could not be recorded, as in the meta of a Record
    view: View
    tokens: int
    block: int
    window: int  # tokens of a window
    windows: tuple[int, ...]  # where the windows begin
    left_out: tuple[int, ...]  # windows for which the page has no room


def count_tokens(reader: TextReader, example: TextExample) -> int:
    """Return the number of tokens of a text. Raises ValueError if the model cannot read it."""
    return max(len(rows[0]) for rows in reader.encode_examples([example]).values())


def explain_long_gap(reader: TextReader, example: TextExample) -> str | None:
    """Return why a reader cannot read a text by totals, or None."""
    if not isinstance(reader, PretrainedReader):
        return "it is a run of attnlab"
    if reader.two_sided or example.second is not None:
        return "it reads two texts"
    if dispatch.find_adaptation(reader.model) is not None:
        return "its attention is adapted"
    return None


def choose_block(tokens: int) -> int:
    """Return the number of tokens of a block: the smallest power of 2 with at most BLOCKS blocks."""
    block = LEAST_BLOCK
    while block * BLOCKS < tokens:
        block *= 2
    return block


def read_long_text(
    reader: PretrainedReader, example: TextExample, groups: Categories, *, windows: Sequence[int] = (),
    pan: bool = False, layers: Collection[int] | None = None, heads: Collection[int] | None = None,
    progress: Progress = lambda done, total, what: None,
) -> LongReading:  # fmt: skip
    """Read one text without maps of all pairs.

    windows   where windows begin; default: PLACES of them, evenly spaced
    pan       take windows one after another from the first token on, instead
    """
    batch = inputs.build_batch(reader.model, reader.tokenizer, example.text, None, reader.max_length)
    ids = batch["input_ids"]
    batch = {"input_ids": ids}  # one text has no padding
    if "logits_to_keep" in _list_parameters(reader.model):
        batch["logits_to_keep"] = 1  # type: ignore[assignment]
    n = ids.shape[1]
    known = sorted({site.layer for site in find_sites(reader.model)})
    check_known(layers, known, reader.name, "layer")
    starts = choose_windows(n, range(0, n, WINDOW) if pan else windows)
    gather = _Gather(groups, ids, starts, known if layers is None else layers, heads, progress, known[-1] + 1)
    stream_layers(reader.model, batch, gather.add, links=LINKS, block=choose_block(n))
    pieces = [reader.sides["source"].texts[token] for token in ids[0].tolist()]
    unrecorded = describe_unrecorded(reader.model, known).get("unrecorded", "")
    return gather.finish(reader.title, pieces, unrecorded)


def choose_windows(tokens: int, given: Sequence[int]) -> tuple[int, ...]:
    """Return where windows begin. Raises ValueError for one outside of the text."""
    for start in given:
        if not 0 <= start < tokens:
            raise ValueError(f"--window {start} is outside of the text, which has {tokens:,} tokens")
    last = max(0, tokens - WINDOW)
    even = [round(k * last / (PLACES - 1)) for k in range(PLACES)]
    return tuple(dict.fromkeys(min(start, last) for start in (given or even)))


def name_places(starts: Sequence[int]) -> str:
    """Name where windows begin; of more than PLACES the first and the last."""
    if len(starts) > PLACES:
        return f"{len(starts):,} places from {starts[0]:,} to {starts[-1]:,}"
    return ", ".join(f"{start:,}" for start in starts)


class _Gather:
    """Reduces layers as they run."""

    def __init__(
        self, groups: Categories, ids: Tensor, starts: tuple[int, ...], layers: Collection[int],
        heads: Collection[int] | None, progress: Progress, count: int,
    ) -> None:  # fmt: skip
        self.statistics = Statistics(groups, heads=heads)
        self.ids, self.starts, self.layers, self.heads = ids, starts, layers, heads
        self.left_out: tuple[int, ...] = ()
        self.progress, self.count = progress, count
        self.sinks: list[pd.DataFrame] = []
        self.links: list[pd.DataFrame] = []
        self.activations: list[dict[str, Any]] = []
        self.sums = torch.zeros(4, ids.shape[1], dtype=torch.float64)  # of tokens, over heads and layers
        self.heads_read = 0
        self.attentions: list[ViewAttention] = []
        self.kind, self.block = "", 0

    def add(self, streamed: StreamedLayer) -> None:
        found, layer = streamed.totals, streamed.layer
        self.progress(found.index + 1, self.count, "layers")
        if found.index not in self.layers:
            return
        self.kind, chosen = found.kind, select_heads(layer, self.heads)
        causal = layer.attended.causal if isinstance(layer.attended, SoftmaxScores) else layer.hides_any()
        self.statistics.add_totals(found, self.ids, causal=causal)
        sinks = tabulate_sinks([found])
        self.sinks.append(sinks[sinks["head"].isin(chosen)])
        self.links.append(_tabulate_links(found, chosen))
        self.activations.append({"layer": found.index, **_list_activations(streamed.activations)})
        parts = (found.received_weight, found.received_norm, found.taken_norm, found.entropy)
        self.sums += torch.stack([x[0, chosen].double().sum(0).cpu() for x in parts])
        self.heads_read += len(chosen)
        self._add_maps(found, streamed, chosen)

    def _add_maps(self, found: Totals, streamed: StreamedLayer, chosen: list[int]) -> None:
        level = found.level
        assert level is not None
        if not self.attentions:
            kept = 1 if streamed.layer.turning is None else 2  # norms are kept beside weights
            self._keep_windows(len(self.layers) * len(chosen), 2 * level.weight.shape[-1] ** 2, kept)
        self.block = level.block
        maps = {"weight": level.weight[0, chosen].cpu(), "norm": level.norm[0, chosen].cpu()}
        mask = _find_lower(maps["weight"].shape[1]) if streamed.layer.hides_any() else None
        statistics = {
            "entropy": found.entropy[0, chosen].mean(-1).tolist(),
            "norm": found.taken_norm[0, chosen].mean(-1).tolist(),
            "sink": (found.received_weight[0, chosen].amax(-1) / self.ids.shape[1]).tolist(),
        }  # fmt: skip
        self.attentions.append(ViewAttention(0, found.kind, found.index, tuple(chosen), maps, None, mask, statistics))
        for number, start in enumerate(self.starts, start=1):
            stop = min(start + WINDOW, self.ids.shape[1])
            layer, some = streamed.layer, slice(start, stop)
            rows = layer.rows(start, stop)  # (b,h,·,j)
            shown = {"weight": widen(rows)[0, chosen][:, :, some].cpu()}
            vector = found.vector[0, chosen, some].cpu() if layer.turning is None else None
            if vector is None:  # norms are not |α| ‖f(x)‖
                shown["norm"] = measure_taken(layer, found.vector, some, rows)[0, chosen][:, :, some].cpu()
            seen = layer.see(start, stop)[0, 0, :, some].cpu()
            names = tuple(chosen)
            self.attentions.append(
                ViewAttention(number, found.kind, found.index, names, shown, vector, seen, statistics)
            )

    def _keep_windows(self, heads: int, level: int, maps: int) -> None:
        """Keep the first windows for which the page has room.

        heads   number of heads of all layers together
        level   number of cells of the level, for each head
        maps    number of maps of a window, for each head
        """
        room = max(1, (HEAD_CELLS // heads - level) // (maps * min(WINDOW, self.ids.shape[1]) ** 2))
        self.starts, self.left_out = self.starts[:room], self.starts[room:]

    def finish(self, title: str, pieces: list[str], unrecorded: str) -> LongReading:
        n, side = len(pieces), KINDS[self.kind][1]
        level = tuple(f"{start:,}: {pieces[start]}" for start in range(0, n, self.block))
        examples = [ViewExample(f"whole text, {self.block:,} tokens a cell", {side: _build_side(level, joined=False)})]
        for start in self.starts:
            stop = min(start + WINDOW, n)
            examples.append(
                ViewExample(f"tokens {start:,} to {stop - 1:,}", {side: _build_side(tuple(pieces[start:stop]))})
            )
        view = View(title, examples, [ViewRun("model", [Frame(self.attentions)])], self._list_notes(n))
        names = ("received_weight", "received_norm", "taken_norm", "entropy_nats")
        tokens = pd.DataFrame({"position": range(n), "token": pieces})
        for name, values in zip(names, self.sums, strict=True):
            tokens[name] = (values / self.heads_read).tolist()
        tables = self.statistics.tables() | {
            "sinks": pd.concat(self.sinks, ignore_index=True), "tokens": tokens,
            "links": _name_links(pd.concat(self.links, ignore_index=True), pieces),
            "activations": _name_activations(pd.DataFrame(self.activations), pieces),
        }  # fmt: skip
        return LongReading(tables, unrecorded, view, n, self.block, WINDOW, self.starts, self.left_out)

    def _list_notes(self, n: int) -> tuple[str, ...]:
        notes = [
            f"The text has {n:,} tokens. The first example shows it in blocks of {self.block:,}: a cell is the mean "
            "over the queries of a block of what they give all keys of a block. It sums all pairs and is no sample.",
            f"The other examples are windows of {WINDOW} tokens with every weight among them. A window leaves out what "
            "its rows give to tokens outside of it. The statistics of a head are of the whole text.",
        ]
        if self.left_out:
            notes.append(
                f"The page has no room for windows at {name_places(self.left_out)}: choose --layers or --heads."
            )
        return tuple(notes)


def _list_parameters(model: Any) -> Collection[str]:
    import inspect

    return inspect.signature(model.forward).parameters


def _build_side(tokens: tuple[str, ...], *, joined: bool = True) -> ViewSide:
    words = number_words(list(tokens)) if joined else list(range(len(tokens)))
    return ViewSide(tokens, tuple(words), tuple(join_pieces(list(tokens), words)) if joined else tokens)


def _find_lower(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


def _tabulate_links(found: Totals, heads: list[int]) -> pd.DataFrame:
    links = found.links
    assert links is not None
    frames = []
    for head in heads:
        columns = {name: x[0, head].tolist() for name, x in vars(links).items()}
        frames.append(pd.DataFrame({"kind": found.kind, "layer": found.index, "head": head} | columns))
    table = pd.concat(frames, ignore_index=True)
    return table[table["query"] >= 0]


def _name_links(links: pd.DataFrame, pieces: list[str]) -> pd.DataFrame:
    for name in ("query", "key"):
        links[f"{name}_token"] = [pieces[place] for place in links[name]]
    return links


def _list_activations(found: Activations | None) -> dict[str, Any]:
    return {} if found is None else vars(found)


def _name_activations(table: pd.DataFrame, pieces: list[str]) -> pd.DataFrame:
    if "token" in table:
        table = table.rename(columns={"token": "position"})
        table["token"] = [pieces[place] for place in table["position"]]
    return table
