"""An artificial language pair with reordering, fertility and gold word alignments, drawn from a seed.

    source   [adverb] NP verb NP        NP = [determiner] adjective* noun     subject, verb, object; adjectives before
    target   [adverb] NP NP marker verb NP = noun adjective*                  verb last; adjectives after

Each source word has a fertility. Most words translate into one word, every fourth noun into two, and determiners into
none. Determiners are unaligned, and so is the marker that follows every object of the target. Words are drawn with
Zipf's frequencies, p ∝ 1/rank.
"""

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

Links = frozenset[tuple[int, int]]  # (source word, target word), counted from 0

NOUNS, ADJECTIVES, VERBS, ADVERBS, DETERMINERS = 24, 8, 12, 6, 2
SOUNDS = (("bdgklmnrst", "aeiou"), ("fhjpvwz", "aeiouy"))  # consonants and vowels of each language


@dataclass(frozen=True)
class Sentence:
    source: list[str]
    target: list[str]
    links: Links


class Lexicon:
    """The words of both languages, and sentence pairs by the grammar above."""

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng((seed, 0))
        classes = {"noun": NOUNS, "adjective": ADJECTIVES, "verb": VERBS, "adverb": ADVERBS, "determiner": DETERMINERS}
        doubled = len(range(3, NOUNS, 4))  # every fourth noun
        source = _draw_words(draw, sum(classes.values()), 0)
        target = _draw_words(draw, sum(classes.values()) - DETERMINERS + doubled + 1, 1)
        self.seed, self.source_words, self.target_words, self.marker = seed, source, target, target[-1]
        left, right = iter(source), iter(target)
        self.classes: dict[str, list[str]] = {name: [next(left) for _ in range(n)] for name, n in classes.items()}
        self.masses: dict[str, list[float]] = {
            name: np.cumsum(1.0 / np.arange(1, n + 1)).tolist() for name, n in classes.items()
        }
        self.translations: dict[str, list[str]] = {word: [] for word in self.classes["determiner"]}
        for name in ("noun", "adjective", "verb", "adverb"):
            for k, word in enumerate(self.classes[name]):
                two = name == "noun" and k % 4 == 3
                self.translations[word] = [next(right) for _ in range(2 if two else 1)]

    def draw_sentences(self, part: int, count: int) -> list[Sentence]:
        """Draw `count` sentence pairs. The result depends only on the seed and the part."""
        draw = np.random.default_rng((self.seed, 1, part))
        return [self._draw_sentence(draw) for _ in range(count)]

    def _draw_sentence(self, draw: np.random.Generator) -> Sentence:
        adverb = [self._draw_word(draw, "adverb")] if draw.random() < 0.4 else []
        subject, verb, object_ = self._draw_phrase(draw), [self._draw_word(draw, "verb")], self._draw_phrase(draw)
        source = [*adverb, *subject, *verb, *object_]
        first = len(adverb)
        at_verb = first + len(subject)
        order = [*range(first), *_put_noun_first(first, subject), *_put_noun_first(at_verb + 1, object_), None, at_verb]
        target: list[str] = []
        links = set()
        for place in order:
            for word in [self.marker] if place is None else self.translations[source[place]]:
                if place is not None:
                    links.add((place, len(target)))
                target.append(word)
        return Sentence(source, target, frozenset(links))

    def _draw_phrase(self, draw: np.random.Generator) -> list[str]:
        determiner = [self._draw_word(draw, "determiner")] if draw.random() < 0.6 else []
        count = bisect_left([0.5, 0.85], draw.random())  # 0, 1 or 2 with p = 0.5, 0.35, 0.15
        adjectives = [self._draw_word(draw, "adjective") for _ in range(count)]
        return [*determiner, *adjectives, self._draw_word(draw, "noun")]

    def _draw_word(self, draw: np.random.Generator, name: str) -> str:
        mass = self.masses[name]
        return self.classes[name][bisect_left(mass, draw.random() * mass[-1])]


def _put_noun_first(start: int, phrase: list[str]) -> list[int]:
    places = list(range(start, start + len(phrase)))
    return [places[-1], *places[:-1]]


def _draw_words(draw: np.random.Generator, count: int, language: int) -> list[str]:
    """Draw distinct pronounceable words of two or three syllables."""
    consonants, vowels = SOUNDS[language]
    words: dict[str, None] = {}
    while len(words) < count:
        syllables = range(draw.integers(2, 4))
        words["".join(draw.choice(list(consonants)) + draw.choice(list(vowels)) for _ in syllables)] = None
    return list(words)
