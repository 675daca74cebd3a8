"""The page: whole in itself, and what comes from data stays text."""

from html.parser import HTMLParser

import torch

from attnlab.report.figures import as_png, attention_maps, curves
from attnlab.report.page import Command, Picture, Table, Text, page

HOSTILE = "\"><img onerror='alert(1)' src=x><script>alert(2)</script>"


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.sources, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.sources += [value for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data):
        self.text += data


def test_hostile_text_stays_text():
    picture = Picture(as_png(curves({HOSTILE: ([0, 1], [0, 1])}, x="x", y="y")), HOSTILE)
    parts = [Table([HOSTILE], [[HOSTILE]]), picture, Text(HOSTILE), Command(HOSTILE)]
    tags = Tags(page(HOSTILE, [(HOSTILE, parts)]))
    assert "script" not in tags.tags
    assert tags.tags.count("img") == 1
    assert tags.text.count(HOSTILE) == 7  # title, two headings, two cells, text, command
    assert all(source.startswith("data:") for source in tags.sources)


def test_negative_weights_get_a_scale_that_is_zero_in_the_middle():
    maps = {"a": torch.tensor([[0.5, -0.25]]), "b": torch.tensor([[1.0, 0.0]])}
    figure = attention_maps(maps, ["x"], ["y", "z"])
    for axis in figure.axes[:2]:
        assert axis.images[0].get_clim() == (-1.0, 1.0)
    positive = attention_maps({"a": torch.tensor([[0.5, 0.25]])}, ["x"], ["y", "z"])
    assert positive.axes[0].images[0].get_clim() == (0.0, 0.5)
