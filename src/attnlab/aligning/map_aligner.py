"""Align words by soft maps: open the models once, choose what to read on a sample, then align text chunk by chunk."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

import numpy as np
import torch

from attnlab.aligning.choice import Candidate, RowSetting
from attnlab.aligning.deciding import DecisionRule, decide_links
from attnlab.aligning.extraction import FoundLinks, PairReader, Sentences, Tick, find_links, plan_pairs
from attnlab.aligning.map_choice import choose_by_agreement, choose_by_evidence, count_words, spread_sample
from attnlab.aligning.model_inputs import ModelLoader
from attnlab.aligning.pair_readers import PretrainedTranslator, open_run_reader
from attnlab.aligning.request import WORD_MODELS, AlignmentRequest, Pairs, SelectionGold
from attnlab.aligning.row_evidence import compare_settings
from attnlab.aligning.soft_maps import join_maps
from attnlab.aligning.trained_aligner import FILE, TrainedAligner
from attnlab.aligning.views import AttentionView, Encoder, EncoderView, PairView
from attnlab.analysis.symmetrise import Link
from attnlab.models.lstm_config import LSTMConfig
from attnlab.tasks.links import Gold
from attnlab.training.run_list import find_folder, refuse_missing_run, suggest_runs
from attnlab.training.runs import Run, choose_device, open_run

SAMPLE = 200  # pairs on which a map is chosen
FEWEST = 60  # words of both sides; on fewer, many layers agree by chance
Scored = list[dict[Link, float]]


@dataclass(frozen=True, eq=False)
class RunTranslator:
    """An attnlab run that reads the pairs of one direction."""

    run: Run

    def open_pairs(self, source: Sentences, target: Sentences) -> PairReader:
        return open_run_reader(self.run, source, target)

    @property
    def usual_setting(self) -> RowSetting:
        """Return awo for an LSTM, which predicts after it attends, else awi (Kobayashi et al. 2020)."""
        return "awo" if isinstance(self.run.recipe.model, LSTMConfig) else "awi"


Direction = RunTranslator | PretrainedTranslator
OpenView = Callable[[Pairs], PairView]


@dataclass(eq=False)
class MapAligner:
    """Models, and the views by which they read any text once `choose` has run."""

    request: AlignmentRequest
    directions: list[Direction] = field(default_factory=list)  # the second translates back
    encoders: list[Encoder] = field(default_factory=list)
    trained: TrainedAligner | None = None
    views: list[OpenView] = field(default_factory=list)
    chosen: list[Candidate | int] = field(default_factory=list)  # of each direction, or the layer of each encoder
    notes: list[str] = field(default_factory=list)  # on what was chosen
    left_out: dict[str, list[int]] = field(default_factory=dict)  # lines without links so far, from 1, by reason
    lines: int = 0  # lines so far
    aligned: int = 0  # pairs so far

    @classmethod
    def open(cls, model: str, request: AlignmentRequest, reverse: str | None = None) -> "MapAligner":
        """Open the model, and the model of the other direction if there is one."""
        names = [model] if reverse is None else [model, reverse]
        trained = find_folder(model, FILE) is not None
        request.refuse_unused(one_map=reverse is None and request.by != "encoder" and not trained)
        if (folder := find_folder(model, FILE)) is not None:
            if reverse is not None:
                raise ValueError(f"{folder} is a trained aligner and reads both directions: omit --reverse")
            return cls(request, trained=TrainedAligner.load(folder, request))
        request.refuse_training(model)
        loader = ModelLoader(choose_device(request.device), request.allow_code, request.precision)
        if request.by == "encoder":
            request.refuse_options(("setting", "head"), "is for cross attention; omit it with --by encoder")
            opened = [Encoder.open(name, loader, request.get_languages(k)) for k, name in enumerate(names)]
            return cls(request, encoders=opened)
        made: list[Direction] = []
        for k, name in enumerate(names):
            if find_folder(name, "model.json"):
                if request.precision == "int8":
                    raise ValueError("--precision int8 is for Hugging Face models; omit it for a run")
                run = open_run(name, device=request.device, allow_code=request.allow_code)
                made.append(RunTranslator(run))
                continue
            refuse_missing_run(name)
            with suggest_runs(name, WORD_MODELS):
                made.append(PretrainedTranslator.open(name, loader, request.get_languages(k)))
        return cls(request, directions=made)

    def choose(self, pairs: Pairs, tick: Tick = lambda done, of: None) -> None:
        """Choose layers, heads and settings on at most SAMPLE of these pairs, unless the request fixes them."""
        if self.trained is not None:
            self.views, self.notes = [self.trained.open_pairs], [self.trained.describe()]
        elif self.encoders:
            self._choose_layers(_pick_pairs(pairs, SAMPLE))
            self._centre_encoders(pairs)
        else:
            self._choose_candidates(pairs, tick)
        self._build_views()

    def restore(self, chosen: Sequence[dict[str, object] | int], pairs: Pairs) -> None:
        """Take the choices of an interrupted command in place of `choose`, which it made on these pairs."""
        self.chosen = [each if isinstance(each, int) else Candidate(**each) for each in chosen]  # type: ignore[arg-type]
        if self.trained is not None:
            self.views = [self.trained.open_pairs]
        self._centre_encoders(pairs)
        self._build_views()

    def align(self, pairs: Pairs, tick: Tick = lambda done, of: None) -> Scored:
        """Return the links of each pair with their values in the joined map."""
        found: Scored = [{} for _ in pairs[0]]
        views = [open_view(pairs) for open_view in self.views]
        readable = np.logical_and.reduce([view.readable for view in views])
        self._note_left_out(views)
        self.lines += len(found)
        lengths = tuple(np.maximum.reduce([view.lengths[side] for view in views]) for side in (0, 1))
        sizes = [(len(x), len(y)) for x, y in zip(*pairs, strict=True)]
        done = 0
        for numbers in plan_pairs(readable, lengths, min(view.batch_tokens for view in views)):
            own = [sizes[number] for number in numbers]
            widest = max(s for s, _ in own), max(t for _, t in own)
            maps = [each for view in views for each in view.read_maps(numbers, widest)]
            with torch.no_grad():
                joint = join_maps([each.detach() for each in maps], self.request.combine)
            for number, links in zip(numbers, decide_links(joint, own, self.rule), strict=True):
                found[number] = links
            done += len(numbers)
            tick(done, int(readable.sum()))
        self.aligned += int(readable.sum())
        return found

    def list_notes(self) -> list[str]:
        """Return what was chosen, and which pairs have no links because a model cannot read them."""
        lost = [_describe_lines(why, lines) for why, lines in self.left_out.items()]
        return [*self.notes, *lost, *([] if self.aligned else ["no pair was aligned"])]

    def _note_left_out(self, views: Sequence[PairView]) -> None:
        """Add the lines that one of the models cannot read, each for the first reason."""
        known: set[int] = set()
        for why, indices in (item for view in views for item in view.left_out.items()):
            self.left_out.setdefault(why, []).extend(self.lines + k + 1 for k in indices if k not in known)
            known.update(indices)

    @property
    def rule(self) -> DecisionRule:
        """The rule of decision: with one direction of attention, each target word takes its best source word."""
        return self.request.build_rule(single=len(self.directions) == 1, trained=self.trained is not None)

    def _build_views(self) -> None:
        if self.encoders:
            self.views = [self._open_encoder(k) for k in range(len(self.encoders))]
        elif self.directions:
            alone = len(self.directions) == 1
            self.views = [self._open_attention(k, alone) for k in range(len(self.directions))]

    def _open_encoder(self, k: int) -> OpenView:
        encoder, layer = self.encoders[k], self.chosen[k]
        assert isinstance(layer, int)
        return lambda pairs: EncoderView(encoder, pairs[0], pairs[1], layer, self.request.temperature)

    def _open_attention(self, k: int, alone: bool) -> OpenView:
        candidate, direction = self.chosen[k], self.directions[k]
        assert isinstance(candidate, Candidate)
        null = alone and self.rule.decide == "argmax"

        def open_view(pairs: Pairs) -> PairView:
            source, target = pairs if k == 0 else pairs[::-1]
            reader = direction.open_pairs(source, target)
            return AttentionView(reader, candidate, self.request.pieces, backward=k == 1, null=null)

        return open_view

    def _choose_candidates(self, pairs: Pairs, tick: Tick) -> None:
        request, two = self.request, len(self.directions) == 2
        reading = request.build_reading(two=two)
        selection = request.selection if reading.rule == "best-on" else None
        if reading.rule == "best-on" and selection is None:
            raise ValueError("best-on needs gold links: write best-on:FILE, or pass --gold FILE")
        text = selection.pairs or pairs if selection else _pick_pairs(pairs, SAMPLE)
        self._note_tokenization()
        readers = [d.open_pairs(*(text if k == 0 else text[::-1])) for k, d in enumerate(self.directions)]
        readable = np.flatnonzero(np.logical_and.reduce([reader.readable for reader in readers])).tolist()
        words = count_words(*([side[k] for k in readable] for side in text))
        if reading.by == "auto" and two and words < FEWEST:
            reading = replace(reading, by="norm", layer="highest-norm")
            self.notes.append(f"{words} words are too few to compare layers by agreement: those of the highest norm")
        found: list[FoundLinks] = []
        for reader in readers:
            if not reader.readable.any():
                self.chosen = [Candidate("norm", "awi", 0, "mean")] * len(self.directions)
                return
            how = {"with_norms": reading.rule == "highest-norm", "with_entropies": reading.rule == "lowest-entropy"}
            how["with_null"] = reading.rule != "agreement"
            found.append(find_links(reader, reading.candidates, **how, tick=tick))
        if reading.rule == "agreement" and two:
            best = choose_by_agreement(found[0].aligned, found[1].aligned, words)
            self.chosen = [best.forward, best.backward]
            self.notes.append(best.explain(len(readable)))
        elif reading.rule == "agreement":
            candidate, why = choose_by_evidence(*text, found[0].aligned)
            self.chosen = [candidate]
            self.notes.append(why)
        else:
            for k, links in enumerate(found):
                gold = selection and (selection.gold if k == 0 else reverse_gold(selection.gold))
                chosen = links.choose_best(reading, gold or None)
                if reading.setting == "auto" and selection is None and reading.by not in ("probe", "gradient"):
                    chosen = self._choose_setting(k, text, links, chosen)
                self.chosen.append(chosen)
        self.notes += [f"{'reverse: ' if k else ''}read {each}" for k, each in enumerate(self.chosen)]

    def _choose_setting(self, k: int, text: Pairs, links: FoundLinks, chosen: Candidate) -> Candidate:
        readings = {setting: replace(chosen, setting=setting) for setting in get_args(RowSetting)}
        source, target = text if k == 0 else text[::-1]
        evidence = compare_settings(source, target, {s: links.aligned[c] for s, c in readings.items()})
        direction = self.directions[k]
        usual = direction.usual_setting if isinstance(direction, RunTranslator) else "awi"
        self.notes.append(f"{'reverse: ' if k else ''}{evidence.explain(usual)}")
        return readings[evidence.choose_setting(usual)]

    def _note_tokenization(self) -> None:
        for direction in self.directions:
            if isinstance(direction, RunTranslator) and getattr(direction.run.recipe.data, "moses", False):
                trained = "this run was trained on Moses-tokenised text"
                self.notes.append(f"{trained}; if your files are not tokenised, pass --tokenize moses")
                return

    def _centre_encoders(self, pairs: Pairs) -> None:
        """Compute the mean vectors of each encoder from the sample, also if the command continues at a later line."""
        sample = _pick_pairs(pairs, SAMPLE)
        for encoder, layer in zip(self.encoders, self.chosen, strict=False):
            assert isinstance(layer, int)
            EncoderView(encoder, *sample, layer, self.request.temperature).find_centres([layer])

    def _choose_layers(self, pairs: Pairs) -> None:
        """Choose the layer of each encoder: the one asked for, or the one whose mutual links cover most words."""
        asked = self.request.layer
        for encoder in self.encoders:
            if asked is not None and asked.isdecimal():
                if int(asked) > encoder.layers:
                    raise ValueError(f"layer must be 0 (the input) to {encoder.layers} in {encoder.name}, got {asked}")
                self.chosen.append(int(asked))
                continue
            if asked is not None and asked != "agreement":
                raise ValueError(f"--by encoder takes --layer as a number from 0, or agreement, got {asked!r}")
            scores = _measure_layers(EncoderView(encoder, *pairs, encoder.layers, self.request.temperature), pairs)
            best = max(scores, key=lambda layer: scores[layer])
            self.chosen.append(best)
            share = f"links both ways cover {100 * scores[best]:.0f} % of the words of {len(pairs[0]):,} pairs"
            self.notes.append(f"read by encoder, layer {best} of {encoder.layers} of {encoder.name} ({share})")


def _describe_lines(why: str, lines: Sequence[int]) -> str:
    named = ", ".join(f"{line:,}" for line in lines[:5]) + (", …" if len(lines) > 5 else "")
    several = "s" if len(lines) > 1 else ""
    return f"without links: {len(lines):,} pair{several} {why} (line{several} {named})"


def _measure_layers(view: EncoderView, pairs: Pairs) -> dict[int, float]:
    """Return the mean value of mutual links, over all words, for each layer of an encoder above the input."""
    layers = list(range(1, view.encoder.layers + 1))
    totals, words = dict.fromkeys(layers, 0.0), max(count_words(*pairs), 1)
    mutual = DecisionRule(decide="mutual", null=0.0)
    for numbers in plan_pairs(view.readable, view.lengths, view.batch_tokens // 4):
        own = [(len(pairs[0][k]), len(pairs[1][k])) for k in numbers]
        widest = max(s for s, _ in own), max(t for _, t in own)
        for layer, maps in zip(layers, view.read_layers(numbers, widest, layers), strict=True):
            links = decide_links(join_maps(maps), own, mutual)
            totals[layer] += 2 * sum(sum(each.values()) for each in links)
    return {layer: total / words for layer, total in totals.items()}


def _pick_pairs(pairs: Pairs, limit: int) -> Pairs:
    full = [k for k, (x, y) in enumerate(zip(*pairs, strict=True)) if len(x) and len(y)]
    numbers = [full[k] for k in spread_sample(len(full), limit)] or list(range(min(1, len(pairs[0]))))
    return [pairs[0][k] for k in numbers], [pairs[1][k] for k in numbers]


def reverse_gold(gold: Gold) -> Gold:
    """Return gold links with source and target exchanged."""
    turned = [[frozenset((t, s) for s, t in links) for links in side] for side in (gold.sure, gold.possible)]
    return Gold(turned[0], turned[1])


__all__ = ["MapAligner", "SelectionGold", "reverse_gold"]
