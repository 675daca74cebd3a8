"""Sentences whose words are numbers read as lists of words, in 4 bytes a word."""

import sys

import numpy as np

from attnlab.tasks.numbered_text import NumberedText, number_words

LINES = [["a", "b", "a"], [], ["b", "ü"], []]


def test_a_numbered_text_reads_as_its_lines():
    text = NumberedText(LINES)
    assert len(text) == 4
    assert list(text) == LINES
    assert [text[k] for k in range(-4, 4)] == LINES * 2
    assert text[1:] == LINES[1:]
    assert text.types == ["a", "b", "ü"]
    assert text.numbers.tolist() == [0, 1, 0, 1, 2]
    assert text.lengths.tolist() == [3, 0, 2, 0]
    assert number_words(text) is text
    assert list(number_words(LINES)) == LINES
    assert list(NumberedText()) == NumberedText().lengths.tolist() == []


def test_a_long_text_takes_4_bytes_a_word():
    words = [str(k) for k in range(100)]
    text = NumberedText(words for _ in range(10_000))
    assert text.numbers.dtype == np.int32
    held = sys.getsizeof(text._numbers) + sys.getsizeof(text._ends)
    assert held < 1.25 * (4 * 10**6 + 8 * 10**4)
