"""The table of contributions, and words out of pieces."""

import pandas as pd
import pytest
import tiny_models
import torch
from small_models import LM, TRANSLATOR, made
from test_contribution import padded

import attnlab
from attnlab.analysis.contribution import norms
from attnlab.analysis.signed import signed_shares
from attnlab.analysis.words import join_pieces, number_words, pool_by_word
from attnlab.huggingface import pretrained
from attnlab.records.record import Record

COLUMNS = ["example", "kind", "layer", "head", "query", "key", "query_token", "key_token", "weight", "norm", "signed"]


@pytest.fixture(scope="module")
def translated() -> Record:
    torch.manual_seed(0)
    return attnlab.record(made(TRANSLATOR), (padded(), padded(length=5)))


def test_every_visible_pair_has_a_row(translated):
    table = attnlab.contribution(translated)
    assert list(table.columns) == COLUMNS
    own = {"source": [7, 4, 7], "target": [5, 4, 5]}  # tokens that are not padding
    pairs = {
        "encoder-self": sum(n * n for n in own["source"]),
        "decoder-self": sum(n * (n + 1) // 2 for n in own["target"]),
        "cross": sum(i * j for i, j in zip(own["target"], own["source"], strict=True)),
    }
    assert table["kind"].value_counts().to_dict() == {kind: 2 * 3 * n for kind, n in pairs.items()}
    assert not table.duplicated(COLUMNS[:6]).any()


def test_its_numbers_are_those_of_the_layers(translated):
    table = attnlab.contribution(translated).set_index(COLUMNS[:6])
    together = attnlab.contribution(translated, level="layer")
    assert list(together.columns) == [name for name in COLUMNS if name != "head"]
    together = together.set_index(["example", "kind", "layer", "query", "key"])
    for layer in translated.layers:
        found = norms(layer)
        for b, h, i, j in ((0, 2, 3, 1), (1, 0, 3, 3), (2, 1, 4, 0)):
            row = table.loc[(b, layer.kind, layer.index, h, i, j)]
            assert row["weight"] == float(layer.weights[b, h, i, j])
            assert row["norm"] == float(found.head[b, h, i, j])
            assert row["signed"] == float(signed_shares(layer).head[b, h, i, j])
            row = together.loc[(b, layer.kind, layer.index, i, j)]
            assert row["weight"] == float(found.weight[b, i, j])
            assert row["norm"] == float(found.layer[b, i, j])
            assert row["signed"] == float(signed_shares(layer).layer[b, i, j])


def test_some_kinds_layers_and_heads(translated):
    table = attnlab.contribution(translated, kinds=["cross"], layers=[1], heads=[2, 0])
    assert set(table["kind"]) == {"cross"}
    assert (set(table["layer"]), set(table["head"])) == ({1}, {0, 2})
    whole = attnlab.contribution(translated)
    same = whole[(whole["kind"] == "cross") & (whole["layer"] == 1) & whole["head"].isin([0, 2])].reset_index(drop=True)
    pd.testing.assert_frame_equal(table, same, check_categorical=False)


def test_the_tokens_beside_the_numbers(translated):
    table = attnlab.contribution(translated, kinds=["cross"], heads=[0], layers=[0])
    for side, column in (("target", "query"), ("source", "key")):
        expected = [
            str(int(translated.tokens[side][b, n])) for b, n in zip(table["example"], table[column], strict=True)
        ]
        assert table[f"{column}_token"].tolist() == expected


@pytest.mark.parametrize("lazy", [False, True])
def test_a_hugging_face_model(lazy, tmp_path):
    record = pretrained.record(tiny_models.gpt2(), ["the cat sat", "it"], tokenizer=tiny_models.tokenizer(), lazy=lazy)
    record.save(tmp_path / "record")
    table = attnlab.contribution(record, heads=[1], layers=[0])
    assert list(zip(table["query_token"], table["key_token"], strict=True)) == [
        ("the", "the"), ("cat", "the"), ("cat", "cat"), ("sat", "the"), ("sat", "cat"), ("sat", "sat"), ("it", "it"),
    ]  # fmt: skip
    loaded = attnlab.contribution(Record.load(tmp_path / "record"), heads=[1], layers=[0])
    pd.testing.assert_frame_equal(loaded, table)


def test_pictures_have_places_for_tokens():
    record = pretrained.record(tiny_models.vit(), {"pixel_values": torch.randn(2, 3, 8, 8)})
    table = attnlab.contribution(record, layers=[0], heads=[0])
    assert len(table) == 2 * 5 * 5
    assert table["key_token"].tolist() == [str(key) for key in table["key"]]


# words


def test_a_word_gives_the_sum_and_receives_the_mean_of_its_pieces():
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert pool_by_word(x, [0, 0], [0, 1, 1]).tolist() == [[2.5, 8.0]]
    assert pool_by_word(x, [0, 1], [0, 0, 0]).tolist() == [[6.0], [15.0]]
    assert torch.equal(pool_by_word(x, [0, 1], [0, 1, 2]), x)


@pytest.mark.parametrize(
    ("pieces", "words", "text"),
    [
        (["[CLS]", "un", "##do", "##ne", ".", "[SEP]"], [0, 1, 1, 1, 2, 3], ["[CLS]", "undone", ".", "[SEP]"]),
        (["▁the", "▁ma", "t", ".", "</s>"], [0, 1, 1, 1, 2], ["the", "mat.", "</s>"]),
        (["<s>", "The", "Ġc", "at", "</s>", "</s>"], [0, 1, 2, 2, 3, 4], ["<s>", "The", "cat", "</s>", "</s>"]),
        (["The", "Ġcat", "<|endoftext|>", "The"], [0, 1, 2, 3], ["The", "cat", "<|endoftext|>", "The"]),
        (["th@@", "e", "cat"], [0, 0, 1], ["the", "cat"]),
        (["th", "e</w>", "cat</w>", "s"], [0, 0, 1, 2], ["the", "cat", "s"]),
        (["the", "cat", "##"], [0, 1, 2], ["the", "cat", "##"]),
        (["▁a", "▁##", "▁b", "⏎", "###", "c"], [0, 1, 2, 3, 4, 4], ["a", "##", "b", "⏎", "###c"]),
        (["東⟨1/2⟩", "東⟨2/2⟩", "京"], [0, 0, 1], ["東", "京"]),
        (["a"], [0], ["a"]),
        ([], [], []),
    ],
)  # fmt: skip
def test_pieces_are_put_together_by_their_marks(pieces, words, text):
    assert number_words(pieces) == words
    assert join_pieces(pieces, words) == text


def test_words_of_a_real_model():
    text = "The cat sat unbelievably still."
    record = attnlab.record(tiny_models.minilm(), [text, "Nobody saw it."])
    table = attnlab.contribution(record, words=True, layers=[2], heads=[3])
    first = table[table["example"] == 0]
    shown = list(dict.fromkeys(first["key_token"]))
    assert shown == ["[CLS]", "the", "cat", "sat", "unbelievably", "still", ".", "[SEP]"]
    pieces = record.words["source"][0]
    assert len(pieces) > len(shown)
    long = [n for n, word in enumerate(number_words(pieces)) if word == 4]
    found = norms(record.layers[2]).head[0, 3]
    into = first[(first["query"] == 4) & (first["key"] == 2)]["norm"].item()
    assert into == pytest.approx(float(found[long, 2].mean()), rel=1e-5)
    out_of = first[(first["query"] == 2) & (first["key"] == 4)]["norm"].item()
    assert out_of == pytest.approx(float(found[2, long].sum()), rel=1e-5)
    sums = table.groupby(["example", "query"])["weight"].sum()
    assert sums.tolist() == pytest.approx([1.0] * len(sums), abs=1e-5)


def test_words_may_be_numbered_by_hand(translated):
    words = {"source": [[0, 0, 1, 1, 1, 2, 3], [0, 1, 1, 2], [0] * 7], "target": [[0, 0, 1, 1, 2], [0] * 4, range(5)]}
    table = attnlab.contribution(translated, words=words, kinds=["cross"])
    assert len(table) == 2 * 3 * (3 * 4 + 1 * 3 + 5 * 1)
    one = table[(table["example"] == 0) & (table["layer"] == 0) & (table["head"] == 0)]
    cell = one[(one["query"] == 1) & (one["key"] == 1)]["weight"].item()
    assert cell == pytest.approx(float(translated.kind("cross")[0].weights[0, 0, 2:4, 2:5].sum(-1).mean()))


# what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "word"}, "'word'"),
        ({"level": "layer", "heads": [0]}, "heads="),
        ({"kinds": ["self"]}, "'self' layers; it has encoder-self, decoder-self, cross"),
        ({"layers": [2]}, r"no layer 2; its layers are 0-1"),
        ({"heads": [3]}, r"encoder\.blocks\.0\.attention has no head 3; its heads are 0-2"),
        ({"limit": 100}, "limit=100"),
        ({"words": True}, "no text of its source"),
        ({"words": {"target": [[0]]}}, "no word indices for the source"),
        ({"words": {"source": [[0, 1]] * 3}}, "2 word indices, but source 0 has 7"),
        ({"words": {"source": [[0, 0, 0, 0, 0, 0, 2]] * 3}}, r"got \[0, 2\]"),
    ],
)
def test_wrong_requests(translated, options, message):
    with pytest.raises(ValueError, match=message):
        attnlab.contribution(translated, **options)


def test_what_is_no_record():
    with pytest.raises(TypeError, match="a LanguageModel"):
        attnlab.contribution(made(LM))
    with pytest.raises(ValueError, match="no layers"):
        attnlab.contribution(Record([]))
    with pytest.raises(ValueError, match=r"2 queries and 3 keys .* \(3, 2\)"):
        pool_by_word(torch.zeros(3, 2), [0, 1], [0, 1, 2])
