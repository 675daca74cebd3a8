"""Two corpora small enough to know what attention learns from them."""

import json
import random
from dataclasses import dataclass, replace

from item_runs import make_setting, run_item

from attnlab.studies.snell2021.plan import LstmCorpus, ScaleSize
from attnlab.studies.snell2021.role_run import read_corpora
from attnlab.studies.snell2021.trials import Field, Trial
from attnlab.tasks.classification import ClassificationConfig
from attnlab.tasks.translation import TranslationConfig

NOISE = [f"n{k}" for k in range(17)]


def texts_in(folder):
    """One word of a text says its class, and stands anywhere among words that say nothing."""
    draw = random.Random(0)
    for part, count in (("train", 601), ("valid", 83)):
        lines = []
        for _ in range(count):
            words = draw.choices(NOISE, k=draw.randint(5, 13))
            label = draw.choice(["good", "bad"])
            words.insert(draw.randrange(len(words) + 1), label)
            lines.append(json.dumps({"text": " ".join(words), "label": label}))
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    data = ClassificationConfig(data=str(folder / "train.jsonl"), valid=str(folder / "valid.jsonl"))
    return LstmCorpus("sst", "texts", "SST", data, from_scale="smoke", proxy=(1e-2, 5))


def pairs_in(folder):
    """Sentences of eleven words, each translated by itself."""
    draw = random.Random(0)
    for part, count in (("train", 503), ("valid", 29)):
        sources = [draw.choices(range(11), k=draw.randint(2, 7)) for _ in range(count)]
        rows = (" ".join(f"s{k}" for k in x) + "\t" + " ".join(f"t{k}" for k in x) for x in sources)
        (folder / f"{part}.tsv").write_text("\n".join(rows) + "\n")
    files = {"data": str(folder / "train.tsv"), "valid": str(folder / "valid.tsv")}
    data = TranslationConfig(**files, units="word", source_begin=True)
    return LstmCorpus("multi30k", "Multi30k", "Multi30k", data, from_scale="smoke", proxy=(1e-2, 3))


def new_trial(corpus, out, seed=0):
    return Trial(Field(corpus, make_setting(out)), seed)


@dataclass(frozen=True)
class BriefCorpus(LstmCorpus):
    """A corpus of which next to nothing is learnt, and soon, in any process."""

    def size(self, scale):
        size = ScaleSize(width=5, rate=1e-2, measured=7, measured_at=(0, 3), comparisons="BC", proxy_epochs=1, output=5)
        return replace(size, measured_at=(0, 2, 5), comparisons="B") if self.translates else size


def make_brief(corpus):
    return BriefCorpus(**vars(corpus))


def run_trial(corpus, out, list_roles=lambda size: (), *, seed=0, **about):
    """Train and measure A and these roles of a corpus where the ledger of OUT lacks them; return the trial."""
    (row,) = run_item(lambda setting: read_corpora([corpus], setting, list_roles), out, seeds=(seed,), **about)
    return row.trials[0]
