"""Which explanation should a person trust? Every explanation in the lab, scored on the same predictions of real models.

    python benchmarks/faithfulness.py [--out results/faithfulness] [--models smollm2-135m minilm opus-mt-fr-en]
                                      [--examples 16] [--zeroing 4] [--only AttnLRP] [--data $ATTNLAB_DATA]

Each explanation gives every input token a score for one prediction: the next word of a language model after a prefix of
Wikitext-2; a word in the middle of a translation of a caption; the sentence vector of a caption. F is log p of the
model's own word, or the cosine with the vector of the whole sentence. Special tokens, the first token of the language
model (its attention sink) and the last one, which predicts, are always visible.

    deletion    hide the 10 to 50 % of tokens with the highest scores: mean of (F − F') / (F − F_none); high is good
    insertion   hide all others: the same mean; low is good
    agreement   Spearman's ρ of the scores with an intervention: how much F falls when no token reads the value of that
                token, in every layer (KnockOutValue); high is good

F_none: all tokens hidden. A token is hidden by the attention mask; positions stay. Intervals are 95 % bootstrap
percentiles over examples. The random explanation is the control. An explanation's completeness error is the largest
over examples. Value zeroing needs a pass for each token and layer, so it may have fewer examples. --only measures some
explanations on the same predictions, and adds their rows to the results; a row says at which commit, if not the file's.
"""

import argparse
import gzip
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import measuring
import numpy as np
import torch
from scipy.stats import spearmanr
from transformers import AutoTokenizer

import attnlab
from attnlab.analysis.alti import alti_logit
from attnlab.analysis.contribution import average_heads, norms
from attnlab.analysis.rollout import rollout
from attnlab.analysis.signed import signed_shares
from attnlab.huggingface.decomposition import decompose
from attnlab.huggingface.pretrained import open_model
from attnlab.huggingface.zeroing import record_zeroing
from attnlab.recording.interventions import KnockOutValue

SEED, BOOTSTRAP, BATCH, LENGTH = 0, 2000, 64, 13
SHARES = (0.1, 0.2, 0.3, 0.5)  # of the tokens that are hidden or shown
KINDS = {"smollm2-135m": "decoder-self", "minilm": "encoder-self", "opus-mt-fr-en": "cross"}
TEXTS = {
    "smollm2-135m": "wikitext-2/test.txt.gz",
    "minilm": "multi30k/test_2016_flickr.en.gz",
    "opus-mt-fr-en": "multi30k/test_2016_flickr.fr.gz",
}
MODELS = Path.home() / ".cache" / "attnlab-models"  # NAME/: config.json, model.safetensors and the tokenizer
SHARED_DATA = Path(os.environ.get("ATTNLAB_DATA", Path(__file__).parent.parent.parent / "shared" / "data"))


@dataclass
class Case:
    """One prediction of a model: its inputs, the side that is explained, and the tokens that may be hidden."""

    model: object
    kind: str
    batch: dict  # tensors of one example
    position: int  # of the output; −1: the mean of all
    word: int
    vector: torch.Tensor | None  # of the whole sentence
    hideable: torch.Tensor  # (n,) bool

    def run(self, batch, pooled=None):
        """F of every example of a batch, (b,)."""
        with torch.no_grad():
            few = {"logits_to_keep": 1} if self.kind == "decoder-self" else {}
            output = self.model(**batch, **few, **({} if self.vector is not None else {"use_cache": False}))[0]
        if self.vector is None:  # the prediction is at the last position
            return output[:, -1].float().log_softmax(-1)[:, self.word]
        pooled = batch["attention_mask"] if pooled is None else pooled
        means = (output * pooled[..., None]).sum(1) / pooled.sum(1, keepdim=True)
        return torch.cosine_similarity(means, self.vector[None], dim=-1)

    def run_masks(self, masks):
        """F with some tokens visible, for masks (b,n) bool."""
        values = []
        for part in masks.split(BATCH):
            many = {name: x.expand(len(part), *x.shape[1:]) for name, x in self.batch.items()}
            values.append(self.run(many | {"attention_mask": part.long()}))
        return torch.cat(values)

    def intervene(self):
        """How much F falls without the value of each token in every layer, (n,)."""
        n = len(self.hideable)
        many = {name: x.expand(n, *x.shape[1:]) for name, x in self.batch.items()}
        kinds = ("encoder-self", "cross") if self.kind == "cross" else (self.kind,)
        whole = self.run(self.batch)
        with attnlab.intervene(self.model, *(KnockOutValue(kind=kind, token=torch.arange(n)) for kind in kinds)):
            return whole - self.run(many)

    def score(self, output):
        """The number that gradients explain: the logit, or the component along the sentence vector."""
        if self.vector is None:
            return output[0, self.position, self.word]
        return output[0].mean(0) @ (self.vector / self.vector.norm())

    def read(self, maps):
        """The row of a map (1,i,n) that explains the prediction, or the mean of all rows."""
        return maps[0].mean(0) if self.position < 0 else maps[0, self.position]


def explain(case, zeroing):
    """Yield name, scores (n,) and the completeness error of every explanation that the model has."""
    record = attnlab.record(case.model, case.batch, feed_forward=case.kind == "decoder-self")
    layers = record.kind(case.kind)
    yield "weight, last layer", case.read(average_heads(layers[-1])), None
    yield "weight, mean of layers", case.read(sum(average_heads(layer) for layer in layers)), None
    yield "norm, last layer", case.read(norms(layers[-1]).layer), None
    yield "norm, mean of layers", case.read(sum(norms(layer).layer for layer in layers)), None
    shares = [signed_shares(layer) for layer in layers]
    yield "signed, mean of layers", case.read(sum(s.layer for s in shares)), max(s.error for s in shares)
    for name, by in (("weight rollout", "weight-residual"), ("norm rollout", "norm"), ("ALTI", "alti")):
        rolled = rollout(record, by)
        total = sum(x.sum(-1) for kind, x in rolled.items() if kind != "encoder-self" or case.kind == kind)
        yield name, case.read(rolled[case.kind]), float((total - 1).abs().max())
    if case.kind == "decoder-self":
        words = torch.full_like(case.batch["input_ids"], case.word)
        split = alti_logit(record, words)
        yield "ALTI logit", case.read(split.tokens), split.error
    for name, rule in (
        ("gradient × input", "gradient"),
        ("logit split (frozen)", "frozen"),
        ("AttnLRP", "attn-lrp"),
    ):
        parts = decompose(case.model, case.batch, score=case.score, rule=rule)
        yield name, parts.tokens["source" if case.kind == "cross" else "tokens"].float(), parts.error
    if zeroing:
        yield (
            "value zeroing rollout",
            case.read(rollout(record_zeroing(case.model, case.batch), "zeroing")[case.kind]),
            None,
        )


def score_masks(case, scores):
    """The masks of deletion and insertion of one explanation, (2·shares,n)."""
    places = case.hideable.nonzero().flatten()
    order = places[scores[places].argsort(descending=True, stable=True)]
    masks = []
    for share in SHARES:
        top = order[: max(1, round(share * len(order)))]
        hidden, shown = torch.ones_like(case.hideable), ~case.hideable
        hidden[top] = False
        shown = shown.clone()
        shown[top] = True
        masks += [hidden, shown]
    return torch.stack(masks)


def measure(case, zeroing, generator, only=()):
    """Deletion, insertion, agreement and completeness error of every explanation, or of some, by name."""
    found = {name: (scores, error) for name, scores, error in explain(case, zeroing) if not only or name in only}
    effect = case.intervene()
    found["intervention itself"] = (effect, None)
    for draw in range(5):
        found[f"random {draw}"] = (torch.rand(len(effect), generator=generator), None)
    masks = {name: score_masks(case, scores) for name, (scores, _) in found.items()}
    unique, place = torch.unique(torch.cat(list(masks.values())), dim=0, return_inverse=True)
    values = case.run_masks(torch.cat([unique, torch.ones_like(case.hideable)[None], ~case.hideable[None]]))
    whole, none = values[-2], values[-1]
    if not abs(float(whole - none)) > 1e-3:
        return {}
    rows = {}
    for index, (name, (scores, error)) in enumerate(found.items()):
        own = values[place[index * 2 * len(SHARES) : (index + 1) * 2 * len(SHARES)]]
        fall = (whole - own) / (whole - none)
        some = case.hideable
        flat = scores[some].std() == 0 or effect[some].std() == 0
        rho = 0.0 if flat else float(spearmanr(scores[some].numpy(), effect[some].numpy()).statistic)
        rows[name] = {"deletion": float(fall[::2].mean()), "insertion": float(fall[1::2].mean()), "agreement": rho}
        rows[name]["error"] = error
    draws = [rows.pop(f"random {draw}") for draw in range(5)]
    rows["random"] = {key: float(np.mean([d[key] for d in draws])) for key in ("deletion", "insertion", "agreement")}
    return {name: row for name, row in rows.items() if not only or name in only}


def make_cases(name, folder, data, count):
    model = open_model(str(folder), device="cpu", dtype=torch.float32)
    tokenizer, kind = AutoTokenizer.from_pretrained(folder), KINDS[name]
    with gzip.open(data / TEXTS[name], "rt", encoding="utf-8") as file:
        lines = [line.strip().replace(" ,", ",").replace(" .", ".") for line in file]
    lines = [line for line in lines if len(line.split()) >= 10 and not line.startswith("=")]
    for line in lines[:: max(1, len(lines) // count)][:count]:
        if kind == "cross":
            yield make_translation(model, tokenizer, line)
            continue
        ids = tokenizer(line, return_tensors="pt", truncation=True, max_length=LENGTH if kind == "decoder-self" else 64)
        batch = {key: ids[key] for key in ("input_ids", "attention_mask")}
        hideable = ~torch.isin(ids["input_ids"][0], torch.tensor(tokenizer.all_special_ids))
        if kind == "decoder-self":
            hideable[[0, -1]] = False
            with torch.no_grad():
                word = int(model(**batch).logits[0, -1].argmax())
            yield Case(model, kind, batch, LENGTH - 1, word, None, hideable)
        else:
            with torch.no_grad():
                vector = model(**batch)[0][0].mean(0)
            yield Case(model, kind, batch, -1, -1, vector, hideable)


def make_translation(model, tokenizer, line):
    """The prediction of a word in the middle of the model's own translation."""
    ids = tokenizer(line, return_tensors="pt")
    with torch.no_grad():
        (written,) = model.generate(**ids, max_new_tokens=48, do_sample=False, num_beams=1)
    middle = len(written) // 2
    batch = dict(ids) | {"decoder_input_ids": written[None, :middle]}
    hideable = ~torch.isin(ids["input_ids"][0], torch.tensor(tokenizer.all_special_ids))
    return Case(model, "cross", batch, middle - 1, int(written[middle]), None, hideable)


def summarise(name, rows, generator):
    """A row for each explanation: means with bootstrap intervals over examples."""
    table = []
    for method in dict.fromkeys(method for row in rows for method in row):
        own = [row[method] for row in rows if method in row]
        entry = {"model": name, "explanation": method, "examples": len(own)}
        picks = generator.integers(len(own), size=(BOOTSTRAP, len(own)))
        for key in ("deletion", "insertion", "agreement"):
            values = np.array([each[key] for each in own])
            low, high = np.percentile(values[picks].mean(1), [2.5, 97.5])
            entry |= {key: float(values.mean()), f"{key}_low": float(low), f"{key}_high": float(high)}
        errors = [each["error"] for each in own if each.get("error") is not None]
        entry["completeness_error"] = max(errors) if errors else None
        table.append(entry)
    return sort_rows(table)


def sort_rows(table):
    return sorted(table, key=lambda entry: entry["insertion"] - entry["deletion"])


def add_rows(path, table, commit):
    """The stored results of a model, with these rows in place of those of the same explanations."""
    stored = json.loads(path.read_text())
    new = {row["explanation"] for row in table}
    kept = [row for row in stored["rows"] if row["explanation"] not in new]
    return stored["about"], sort_rows(kept + [row | {"commit": commit} for row in table])


COLUMNS = ["explanation", "n", "deletion ↑", "insertion ↓", "agreement ↑", "completeness error"]


def list_cells(rows):
    """The cells of the table of one model."""

    def cell(row, key):
        return f"{row[key]:.2f} [{row[f'{key}_low']:.2f}, {row[f'{key}_high']:.2f}]".replace("-0.00", "0.00")

    for row in rows:
        error = "–" if row["completeness_error"] is None else f"{row['completeness_error']:.0e}"
        scores = [cell(row, key) for key in ("deletion", "insertion", "agreement")]
        yield [row["explanation"], str(row["examples"]), *scores, error]


def render_markdown(folder):
    """The table of docs/attribution.md, from the files of results/faithfulness."""
    lines = ["| " + " | ".join(["model", *COLUMNS]) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name in KINDS:
        if (path := Path(folder) / f"{name}.json").exists():
            for cells in list_cells(json.loads(path.read_text())["rows"]):
                lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--models", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--examples", type=int, default=16)
    parser.add_argument("--zeroing", type=int, default=4, help="examples with value zeroing in the decoders")
    parser.add_argument("--only", nargs="+", default=[], help="names of explanations, whose rows are added to --out")
    parser.add_argument("--data", type=Path, default=SHARED_DATA)
    parser.add_argument("--table", metavar="FOLDER", help="print the table of docs from results, and measure nothing")
    options = parser.parse_args()
    if options.table:
        return print(render_markdown(options.table))
    for name in options.models:
        folder, began = MODELS / name, time.monotonic()
        if not folder.is_dir():
            parser.error(f"no model in {folder}: put config.json, model.safetensors and the tokenizer of {name} there")
        torch_generator, generator = torch.Generator().manual_seed(SEED), np.random.default_rng(SEED)
        rows = []
        for number, case in enumerate(make_cases(name, folder, options.data, options.examples)):
            zeroing = case.kind == "encoder-self" or number < options.zeroing
            zeroing = zeroing and (not options.only or "value zeroing rollout" in options.only)
            rows.append(measure(case, zeroing, torch_generator, options.only))
            print(f"{name}: {number + 1} of {options.examples}, {time.monotonic() - began:.0f} s", file=sys.stderr)
        table = summarise(name, [row for row in rows if row], generator)
        seconds = time.monotonic() - began
        print(f"\n{name}, {len(rows)} examples, {seconds:.0f} s")
        print(measuring.format_table(COLUMNS, list(list_cells(table))))
        about = {"model": name, "examples": options.examples, "seconds": seconds, "shares": SHARES}
        about |= measuring.collect_provenance(SEED)
        if options.only and options.out:
            about, table = add_rows(Path(options.out) / f"{name}.json", table, about["commit"])
        measuring.write_results(options.out, name, about, table)


if __name__ == "__main__":
    main()
