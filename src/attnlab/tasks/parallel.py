"""Where sentence pairs come from: files of one's own, or a named set, part by part."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from attnlab.tasks import hub
from attnlab.tasks.fetch import find_set, obtain_file
from attnlab.tasks.sources import NamedSet
from attnlab.tasks.text import (
    PAIR_FILES,
    Pairs,
    draw_held_out,
    get_suffix,
    is_numeric,
    read_pairs,
    read_parallel,
    read_sgm,
)

if TYPE_CHECKING:
    from attnlab.tasks.translation import TranslationConfig


@dataclass(frozen=True)
class ParallelText:
    """Parts by name, each read when it is asked for."""

    name: str
    languages: tuple[str, str]
    readers: Mapping[str, Callable[[], Pairs]]

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.readers)

    def read_part(self, part: str) -> Pairs:
        return self.readers[part]()


def find_parallel_text(config: "TranslationConfig") -> ParallelText:
    """What a configuration asks for: one's own files where src= or a file is given, else a named set."""
    if config.src is not None or get_suffix(Path(config.data)) in PAIR_FILES:
        return _open_files(config)
    if hub.is_hub_name(config.data):
        return _open_hub(config)
    given = [key for key in OWN_FILES if getattr(config, key) is not None]
    if given:
        raise ValueError(
            f"{given[0]}= goes with src= and tgt=, or a file as data=; data={config.data} has its own parts"
        )
    dataset = find_set(config.data, "translation")
    return READERS[dataset.name](config, dataset)


OWN_FILES = ("valid", "valid_src", "valid_tgt", "test", "test_src", "test_tgt")
Readers = dict[str, Callable[[], Pairs]]


def _open_files(config: "TranslationConfig") -> ParallelText:
    pair = tuple(config.languages) if config.pair else ("", "")
    if not config.pair and (config.moses or any(".tmx" in (f or "") for f in (config.data, config.valid, config.test))):
        raise ValueError("name the languages with pair=, as pair=de-en: Moses and TMX files need them")

    def reader(file: str | None, source: str | None, target: str | None) -> Callable[[], Pairs] | None:
        if source is not None and target is not None:
            return lambda: read_parallel(Path(source), Path(target))
        return (lambda: read_pairs(Path(file), pair)) if file is not None else None

    train = reader(config.data, config.src, config.tgt)
    valid = reader(config.valid, config.valid_src, config.valid_tgt)
    test = reader(config.test, config.test_src, config.test_tgt)
    assert train is not None
    readers = {"train": train, "valid": valid} if valid else _split_pairs(train, 0, config.held_out, config.data_seed)
    return ParallelText(config.src or config.data, (pair[0], pair[1]), readers | ({"test": test} if test else {}))


def _open_hub(config: "TranslationConfig") -> ParallelText:
    if not config.pair:
        raise ValueError(f"data={config.data}: name the languages with pair=, as pair=de-en")
    source, target = config.languages
    splits = hub.load_splits(config.data)

    def reader(part: str) -> Callable[[], Pairs]:
        return lambda: hub.read_pairs(splits[part], (source, target), config.data)

    readers = {part: reader(part) for part in splits}
    if "valid" not in readers:
        readers |= _split_pairs(readers["train"], 0, config.held_out, config.data_seed)
    return ParallelText(config.data, (source, target), readers)


def _split_pairs(whole: Callable[[], Pairs], side: int, share: float, seed: int) -> Readers:
    """Two parts of one text, such that no sentence of a side is in both."""

    @lru_cache(maxsize=1)
    def parts() -> tuple[Pairs, Pairs]:
        pairs = whole()
        out = draw_held_out(pairs[side], share, seed)
        if out.all() or not out.any():
            raise ValueError(f"{len(out)} pairs are too few to hold out {share:.0%} of them; give validation text")
        return _pick_pairs(pairs, ~out), _pick_pairs(pairs, out)

    return {"train": lambda: parts()[0], "valid": lambda: parts()[1]}


def _pick_pairs(pairs: Pairs, kept: np.ndarray) -> Pairs:
    places = np.flatnonzero(kept).tolist()
    return [pairs[0][k] for k in places], [pairs[1][k] for k in places]


def _choose_languages(config: "TranslationConfig", dataset: NamedSet, *pairs: str) -> tuple[str, str]:
    """The pair asked for, or the first one; either direction of the pairs a set has."""
    asked = config.pair or pairs[0]
    known = {*pairs, *("-".join(reversed(pair.split("-"))) for pair in pairs)}
    if asked not in known:
        raise ValueError(f"pair={asked}: {dataset.name} has {', '.join(pairs)}, in either direction")
    source, target = asked.split("-")
    return source, target


def _make_reader(config: "TranslationConfig", dataset: NamedSet, source: str, target: str) -> Callable[[], Pairs]:
    return lambda: read_parallel(obtain_file(dataset, source, config.data_dir), obtain_file(dataset, target, config.data_dir))


def _open_multi30k(config: "TranslationConfig", dataset: NamedSet) -> ParallelText:
    languages = _choose_languages(config, dataset, "de-en", "en-fr", "en-cs", "de-fr", "de-cs", "fr-cs")
    stems = {"train": "train", "valid": "val", "test": "test_2016_flickr", "test2017": "test_2017_flickr",
             "mscoco": "test_2017_mscoco", "test2018": "test_2018_flickr"}  # fmt: skip
    if "cs" in languages:
        del stems["test2017"], stems["mscoco"]
    readers = {
        part: _make_reader(config, dataset, *(f"{stem}.{language}" for language in languages)) for part, stem in stems.items()
    }
    return ParallelText(dataset.name, languages, readers)


def _open_iwslt14(config: "TranslationConfig", dataset: NamedSet) -> ParallelText:
    languages = _choose_languages(config, dataset, "de-en")
    parts = ("train", "valid", "test")
    readers = {part: _make_reader(config, dataset, *(f"{part}.{language}" for language in languages)) for part in parts}
    return ParallelText(dataset.name, languages, readers)


def _open_europarl(config: "TranslationConfig", dataset: NamedSet) -> ParallelText:
    stored = ("en-de", "en-nl", "en-pt", "it-pt")
    languages = _choose_languages(config, dataset, *stored)
    stem = "-".join(languages) if "-".join(languages) in stored else "-".join(reversed(languages))
    readers = {
        part: _make_reader(config, dataset, *(f"{stem}.{part}.{language}" for language in languages))
        for part in ("train", "valid", "test")
    }
    return ParallelText(dataset.name, languages, readers)


def _open_news_commentary(config: "TranslationConfig", dataset: NamedSet) -> ParallelText:
    """Nine tenths for training, one for validation; lines without a letter left out (Snell et al., A.5, A.8)."""
    stored = ("en-nl", "en-pt", "it-pt")
    languages = _choose_languages(config, dataset, *stored)
    stem = "-".join(languages) if "-".join(languages) in stored else "-".join(reversed(languages))

    def whole() -> Pairs:
        path = obtain_file(dataset, f"news-commentary-v14.{stem}.tsv", config.data_dir)
        pairs = _order_sides(read_pairs(path, stem.split("-")), stem, languages)
        kept = [
            bool(x.strip() and y.strip()) and not (is_numeric(x) or is_numeric(y)) for x, y in zip(*pairs, strict=True)
        ]
        return _pick_pairs(pairs, np.array(kept))

    return ParallelText(dataset.name, languages, _split_pairs(whole, 0, 0.1, config.data_seed))


def _open_tatoeba(config: "TranslationConfig", dataset: NamedSet) -> ParallelText:
    """Split by the English side, which many pairs share: 90 % for training, 5 % each for validation and test."""
    languages = _choose_languages(config, dataset, "en-de")
    english = languages.index("en")

    def whole() -> Pairs:
        return _order_sides(read_pairs(obtain_file(dataset, "en-de.tsv", config.data_dir), ("en", "de")), "en-de", languages)

    outer = _split_pairs(whole, english, 0.1, config.data_seed)
    inner = _split_pairs(outer["valid"], english, 0.5, config.data_seed)
    return ParallelText(
        dataset.name, languages, {"train": outer["train"], "valid": inner["train"], "test": inner["valid"]}
    )


def _order_sides(pairs: Pairs, stem: str, languages: tuple[str, str]) -> Pairs:
    return pairs if tuple(stem.split("-")) == languages else (pairs[1], pairs[0])


def _open_wmt14(config: "TranslationConfig", dataset: NamedSet) -> ParallelText:
    """Europarl v7, Common Crawl and News Commentary v9; newstest2013 validates, newstest2014 tests."""
    languages = _choose_languages(config, dataset, "en-de")
    stems = ("europarl-v7.de-en", "commoncrawl.de-en", "news-commentary-v9.de-en")

    def train() -> Pairs:
        texts = [_make_reader(config, dataset, *(f"{stem}.{language}" for language in languages))() for stem in stems]
        return [line for text in texts for line in text[0]], [line for text in texts for line in text[1]]

    def test() -> Pairs:
        names = {"de": "newstest2014-deen-src.de.sgm", "en": "newstest2014-deen-ref.en.sgm"}
        sides = [read_sgm(obtain_file(dataset, names[language], config.data_dir)) for language in languages]
        return sides[0], sides[1]

    valid = _make_reader(config, dataset, *(f"newstest2013.{language}" for language in languages))
    return ParallelText(dataset.name, languages, {"train": train, "valid": valid, "test": test})


READERS: dict[str, Callable[["TranslationConfig", NamedSet], ParallelText]] = {
    "multi30k": _open_multi30k,
    "iwslt14": _open_iwslt14,
    "news-commentary-v14": _open_news_commentary,
    "wmt14": _open_wmt14,
    "europarl": _open_europarl,
    "tatoeba": _open_tatoeba,
}
