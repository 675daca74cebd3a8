"""Words of any script are drawn, where the system has a font that has them."""

from types import SimpleNamespace

import torch
from matplotlib.text import Text

from attnlab.report import figures


def test_words_of_any_script_are_drawn_in_a_font_that_has_them(monkeypatch):
    own = frozenset(map(ord, "abc "))
    files = {"own": own, "slanted": frozenset(map(ord, "猫")), "first": frozenset(map(ord, "猫犬")),
             "second": frozenset(map(ord, "猫犬नम")), "faces": frozenset(map(ord, "क"))}  # fmt: skip
    fonts = [SimpleNamespace(name=name.title(), fname=name, style="italic" if name == "slanted" else "normal")
             for name in files]  # fmt: skip
    fonts[-1].name = "Faces Emoji"
    monkeypatch.setattr(figures, "fontManager", SimpleNamespace(ttflist=fonts))
    monkeypatch.setattr(figures, "findfont", lambda name: "own")
    monkeypatch.setattr(figures, "_list_letters", files.__getitem__)
    assert figures.find_fonts("a cab") == []
    assert figures.find_fonts("a 猫") == ["First"]
    assert figures.find_fonts("猫 न") == ["First", "Second"]
    assert figures.find_fonts("क") == []


def test_a_text_keeps_its_font_and_gets_what_it_lacks(monkeypatch):
    monkeypatch.setattr(figures, "find_fonts", lambda text: ["DejaVu Serif"] if "q" in text else [])
    figure = figures.draw_attention_maps({"one": torch.rand(2, 2)}, ["a", "q"], ["b", "c"])
    before = [text.get_fontfamily() for text in figure.findobj(Text)]
    figures.render_files(figure)
    after = {text.get_text(): text.get_fontfamily() for text in figure.findobj(Text)}
    assert after["q"] == [*before[0], "DejaVu Serif"]
    assert after["a"] == before[0]
