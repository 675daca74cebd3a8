"""The texts of the alignment items: the training text of translators, and sentence pairs aligned by hand.

At full scale it is Europarl, German–English, as the authors prepare it: tokenised by Moses, in lower case, without
pairs that have a side in the gold set. They have all of Europarl v7; here it is a part of 160,000 or 480,000 pairs.
The 508 gold pairs (Vilar et al. 2006) are not changed. Other scales have an artificial language pair with known
alignments.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attnlab.experiments.plan import Workplace
from attnlab.files import write_bytes
from attnlab.files.user_files import read_json
from attnlab.tasks.fetch import obtain_file
from attnlab.tasks.links import Gold, read_gold
from attnlab.tasks.parallel import find_parallel_text
from attnlab.tasks.sources import NamedSet
from attnlab.tasks.synthetic import Synthetic, SyntheticConfig
from attnlab.tasks.text import Pairs, load_moses, read_parallel
from attnlab.tasks.translation import TranslationConfig

LANGUAGES = ("de", "en")
GOLD = NamedSet(
    "gold-alignments", "alignment", "non-commercial",
    "https://www-i6.informatik.rwth-aachen.de/goldAlignment", "gold-alignments/de-en",
    steps="ask for the German–English gold alignment of RWTH Aachen (Vilar et al. 2006) as de-en.de, de-en.en and "
    "de-en.talp, lower-cased and tokenised",
)  # fmt: skip
EUROPARL, MORE_EUROPARL, ABOUT = "europarl", "europarl-480k", "about.json"
PARTS = ("train", "valid", "test")


@dataclass(frozen=True, eq=False)
class GoldCorpus:
    """The configuration of the training text, and sentences in words with their gold links."""

    data: TranslationConfig | SyntheticConfig
    source: list[list[str]]
    target: list[list[str]]
    gold: Gold
    remark: str


def load_lexicon(examples: int) -> GoldCorpus:
    """Load the artificial language pair of `attnlab train synthetic`, whose test part is aligned."""
    config = SyntheticConfig(data="lexicon", examples=examples)
    task = Synthetic(config)
    links = task.read_alignments("test")
    source, target = map(split_words, (task.read_sources("test"), task.read_references("test")))
    remark = f"An artificial language pair, {examples:,} training pairs, {len(links)} test pairs with known links."
    return GoldCorpus(config, source, target, Gold(links, links), remark)


def choose_folder(place: Workplace, data: str) -> Path:
    """Return where the prepared text of a data set is kept."""
    return place.folder / f"{data}-{'-'.join(LANGUAGES)}"


def configure_europarl(place: Workplace, data: str = EUROPARL) -> TranslationConfig:
    """Return the configuration of Europarl as this study prepares it; no file needs to exist."""
    folder = choose_folder(place, data)
    files = {part: [str(folder / f"{part}.{language}") for language in LANGUAGES] for part in PARTS}
    return TranslationConfig(
        src=files["train"][0], tgt=files["train"][1], valid_src=files["valid"][0], valid_tgt=files["valid"][1],
        test_src=files["test"][0], test_tgt=files["test"][1], pair="de-en", subwords="bpe", vocabulary=10_000,
        joint=False, max_length=256, too_long="skip",
    )  # fmt: skip


def load_europarl(place: Workplace, data: str = EUROPARL) -> GoldCorpus:
    """Load Europarl, prepared once for all items of a results folder; OSError if the data are not available."""
    lines, gold = read_gold_pairs(place.data_dir)
    source, target = map(split_words, lines)
    folder = choose_folder(place, data)
    if not (folder / ABOUT).exists():
        _prepare(folder, lines, data, place.data_dir)
    about = read_json(folder / ABOUT)
    remark = (
        f"Europarl, {about['pairs']:,} training pairs after removing {about['removed']} with a side in the gold set; "
        f"{len(gold)} gold pairs."
    )
    return GoldCorpus(configure_europarl(place, data), source, target, gold, remark)


def read_gold_pairs(data_dir: str | None) -> tuple[Pairs, Gold]:
    """Return the lines of the gold pairs, unchanged, and their links."""
    files = [obtain_file(GOLD, f"de-en.{name}", data_dir) for name in (*LANGUAGES, "talp")]
    lines = read_parallel(files[0], files[1])
    return lines, read_gold(files[2], [(len(x.split()), len(y.split())) for x, y in zip(*lines, strict=True)])


def split_words(lines: Sequence[str]) -> list[list[str]]:
    return [line.split() for line in lines]


def read_training_pairs(corpus: GoldCorpus, limit: int | None = None) -> tuple[list[list[str]], list[list[str]]]:
    """Read the first training pairs, in words."""
    if isinstance(corpus.data, TranslationConfig):
        lines = read_parallel(Path(corpus.data.src or ""), Path(corpus.data.tgt or ""))
    else:
        task = Synthetic(corpus.data)
        lines = task.read_sources("train"), task.read_references("train")
    return split_words(lines[0][:limit]), split_words(lines[1][:limit])


def _prepare(folder: Path, gold: Pairs, data: str, data_dir: str | None) -> None:
    text = find_parallel_text(TranslationConfig(data=data, pair="-".join(LANGUAGES), data_dir=data_dir))
    about = {"removed": 0, "pairs": 0}
    for part in PARTS:
        pairs = tokenize_pairs(text.readers[part]())
        kept = remove_gold(gold, pairs) if part == "train" else pairs
        if part == "train":
            about = {"removed": len(pairs) - len(kept), "pairs": len(kept)}
        for side, language in enumerate(LANGUAGES):
            write_bytes(folder / f"{part}.{language}", "".join(f"{pair[side]}\n" for pair in kept).encode())
    write_bytes(folder / ABOUT, (json.dumps(about) + "\n").encode())


def tokenize_pairs(pairs: Pairs) -> list[tuple[str, str]]:
    """Tokenize pairs by Moses, in lower case, and drop those with an empty side."""
    sides = [[*map(load_moses(language)[0], side)] for language, side in zip(LANGUAGES, pairs, strict=True)]
    lowered = ((x.strip().lower(), y.strip().lower()) for x, y in zip(*sides, strict=True))
    return [(x, y) for x, y in lowered if x and y]


def remove_gold(gold: Pairs, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the pairs without a side in the gold set."""
    sources, targets = map(set, gold)
    return [(x, y) for x, y in pairs if x not in sources and y not in targets]
