"""Sources of sentence pairs: user files, a named set or the Hugging Face hub, part by part."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from attnlab.tasks import hub, text
from attnlab.tasks.fetch import find_set, obtain_file
from attnlab.tasks.sources import NamedSet
from attnlab.tasks.text import PAIR_FILES, Pairs, Reader

if TYPE_CHECKING:
    from attnlab.tasks.translation import TranslationConfig

PARTS = ("train", "valid", "test")
OWN_FILES = ("valid", "valid_src", "valid_tgt", "test", "test_src", "test_tgt")


@dataclass(frozen=True)
class ParallelText:
    """A parallel corpus in named parts, each read on demand."""

    name: str
    languages: tuple[str, str]
    readers: Mapping[str, Reader]


def find_parallel_text(config: "TranslationConfig") -> ParallelText:
    """Find the corpus of a configuration: user files (src= or a file as data=), a hub set or a named set."""
    if config.src is not None or text.get_suffix(Path(config.data)) in PAIR_FILES:
        return _open_files(config)
    if hub.is_hub_name(config.data):
        return _open_hub(config)
    if given := next((key for key in OWN_FILES if getattr(config, key) is not None), None):
        raise ValueError(f"{given}= needs src= and tgt=, or a file as data=: data={config.data} has its own parts")
    dataset = find_set(config.data, "translation")
    return READERS[dataset.name](config, dataset)


def _open_files(config: "TranslationConfig") -> ParallelText:
    pair = tuple(config.languages) if config.pair else ("", "")
    if not config.pair and (config.moses or any(".tmx" in (f or "") for f in (config.data, config.valid, config.test))):
        raise ValueError("Moses and TMX files need the languages: set pair=, for example pair=de-en")

    def make_reader(file: str | None, source: str | None, target: str | None) -> Reader | None:
        if source is not None and target is not None:
            return lambda: text.read_parallel(Path(source), Path(target))
        return (lambda: text.read_pairs(Path(file), pair)) if file is not None else None

    train = make_reader(config.data, config.src, config.tgt)
    valid = make_reader(config.valid, config.valid_src, config.valid_tgt)
    test = make_reader(config.test, config.test_src, config.test_tgt)
    assert train is not None
    readers = {"train": train, "valid": valid} if valid else text.hold_out(train, 0, config.held_out, config.data_seed)
    return ParallelText(config.src or config.data, (pair[0], pair[1]), readers | ({"test": test} if test else {}))


def _open_hub(config: "TranslationConfig") -> ParallelText:
    if not config.pair:
        raise ValueError(f"data={config.data} needs the languages: set pair=, for example pair=de-en")
    source, target = config.languages
    splits = hub.load_splits(config.data).items()
    readers: dict[str, Reader] = {
        part: partial(hub.read_pairs, split, (source, target), config.data) for part, split in splits
    }
    if "valid" not in readers:
        readers |= text.hold_out(readers["train"], 0, config.held_out, config.data_seed)
    return ParallelText(config.data, (source, target), readers)


def _choose_languages(config: "TranslationConfig", dataset: NamedSet, *pairs: str) -> tuple[tuple[str, str], str]:
    """Return the languages of pair=, in either direction, and their pair in the set; the default is its first pair."""
    pair = config.pair or pairs[0]
    source, target = pair.split("-")
    for stored in (pair, f"{target}-{source}"):
        if stored in pairs:
            return (source, target), stored
    raise ValueError(f"pair={pair}: {dataset.name} has {', '.join(pairs)}, in either direction")


def _make_reader(config: "TranslationConfig", dataset: NamedSet, stem: str, languages: tuple[str, str]) -> Reader:
    """Return a function that reads the files stem.SOURCE and stem.TARGET."""
    source, target = (f"{stem}.{language}" for language in languages)
    return lambda: text.read_parallel(*(obtain_file(dataset, name, config.data_dir) for name in (source, target)))


def _join(config: "TranslationConfig", dataset: NamedSet, stems: Sequence[str], languages: tuple[str, str]) -> Reader:
    """Return a function that reads several texts as one."""

    def read_all() -> Pairs:
        texts = [_make_reader(config, dataset, stem, languages)() for stem in stems]
        return [line for source, _ in texts for line in source], [line for _, target in texts for line in target]

    return read_all


def _read_table(
    config: "TranslationConfig", dataset: NamedSet, name: str, stored: str, languages: tuple[str, str]
) -> Pairs:
    """Read a .tsv file of the stored pair of languages, in the direction of `languages`."""
    source, target = text.read_pairs(obtain_file(dataset, name, config.data_dir), stored.split("-"))
    return (source, target) if stored == "-".join(languages) else (target, source)


def _open_multi30k(config: "TranslationConfig", dataset: NamedSet) -> ParallelText:
    languages, _ = _choose_languages(config, dataset, "de-en", "en-fr", "en-cs", "de-fr", "de-cs", "fr-cs")
    stems = {"train": "train", "valid": "val", "test": "test_2016_flickr", "test2017": "test_2017_flickr",
             "mscoco": "test_2017_mscoco", "test2018": "test_2018_flickr"}  # fmt: skip
    if "cs" in languages:
        del stems["test2017"], stems["mscoco"]
    readers = {part: _make_reader(config, dataset, stem, languages) for part, stem in stems.items()}
    return ParallelText(dataset.name, languages, readers)


def _open_iwslt14(config: "TranslationConfig", dataset: NamedSet) -> ParallelText:
    languages, _ = _choose_languages(config, dataset, "de-en")
    readers = {part: _make_reader(config, dataset, part, languages) for part in PARTS}
    return ParallelText(dataset.name, languages, readers)


def _open_europarl(config: "TranslationConfig", dataset: NamedSet) -> ParallelText:
    languages, stored = _choose_languages(config, dataset, "en-de", "en-nl", "en-pt", "it-pt")
    readers = {part: _make_reader(config, dataset, f"{stored}.{part}", languages) for part in PARTS}
    return ParallelText(dataset.name, languages, readers)


def _open_more_europarl(config: "TranslationConfig", dataset: NamedSet) -> ParallelText:
    """Open Europarl with the further training pairs en-de.more."""
    languages, _ = _choose_languages(config, dataset, "en-de")
    readers = {part: _make_reader(config, dataset, f"en-de.{part}", languages) for part in PARTS}
    readers["train"] = _join(config, dataset, ("en-de.train", "en-de.more"), languages)
    return ParallelText(dataset.name, languages, readers)


def _open_news_commentary(config: "TranslationConfig", dataset: NamedSet) -> ParallelText:
    """Open News Commentary: 90 % training, 10 % validation, without numeric lines (Snell et al., A.5, A.8)."""
    languages, stored = _choose_languages(config, dataset, "en-nl", "en-pt", "it-pt")

    def read_all() -> Pairs:
        pairs = _read_table(config, dataset, f"news-commentary-v14.{stored}.tsv", stored, languages)
        kept = [all(line.strip() and not text.is_numeric(line) for line in pair) for pair in zip(*pairs, strict=True)]
        return text.pick_rows(pairs, np.array(kept))

    return ParallelText(dataset.name, languages, text.hold_out(read_all, 0, 0.1, config.data_seed))


def _open_tatoeba(config: "TranslationConfig", dataset: NamedSet) -> ParallelText:
    """Open Tatoeba, split by the English side, which many pairs share: 90 % training, 5 % validation, 5 % test."""
    languages, stored = _choose_languages(config, dataset, "en-de")
    english = languages.index("en")
    outer = text.hold_out(
        lambda: _read_table(config, dataset, "en-de.tsv", stored, languages), english, 0.1, config.data_seed
    )
    inner = text.hold_out(outer["valid"], english, 0.5, config.data_seed)
    readers = {"train": outer["train"], "valid": inner["train"], "test": inner["valid"]}
    return ParallelText(dataset.name, languages, readers)


def _open_wmt14(config: "TranslationConfig", dataset: NamedSet) -> ParallelText:
    """Open Europarl v7, Common Crawl and News Commentary v9; validate on newstest2013, test on newstest2014."""
    languages, _ = _choose_languages(config, dataset, "en-de")
    stems = ("europarl-v7.de-en", "commoncrawl.de-en", "news-commentary-v9.de-en")
    read_train = _join(config, dataset, stems, languages)

    def read_test() -> Pairs:
        names = {"de": "newstest2014-deen-src.de.sgm", "en": "newstest2014-deen-ref.en.sgm"}
        sides = [text.read_sgm(obtain_file(dataset, names[language], config.data_dir)) for language in languages]
        return sides[0], sides[1]

    read_valid = _make_reader(config, dataset, "newstest2013", languages)
    return ParallelText(dataset.name, languages, {"train": read_train, "valid": read_valid, "test": read_test})


READERS: dict[str, Callable[["TranslationConfig", NamedSet], ParallelText]] = {
    "multi30k": _open_multi30k,
    "iwslt14": _open_iwslt14,
    "news-commentary-v14": _open_news_commentary,
    "wmt14": _open_wmt14,
    "europarl": _open_europarl,
    "europarl-480k": _open_more_europarl,
    "tatoeba": _open_tatoeba,
}
