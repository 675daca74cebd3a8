"""attnlab align with multilingual models: the language codes of M2M100, NLLB and mBART."""

import json

import pytest
import sentencepiece
import transformers as hf
from aligned_text import cli, write_pairs

from attnlab.aligning.word_tokens import Languages, WordTokenizer
from attnlab.analysis.alignment import NOWHERE

SIZES = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
SPECIALS = ["<s>", "<pad>", "</s>", "<unk>"]
CODES = {"m2m": "en-fr", "nllb": "eng_Latn-fra_Latn", "mbart": "en_XX-fr_XX"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("text"))[0]


@pytest.fixture(scope="module")
def models(text, tmp_path_factory):
    """A folder with a random model of each kind and its own tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "both").write_text((text / "s").read_text() + (text / "t").read_text())
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "both"), model_prefix=str(folder / "it"), vocab_size=60, minloglevel=2
    )
    pieces = sentencepiece.SentencePieceProcessor(str(folder / "it.model"))
    own = [pieces.id_to_piece(number) for number in range(3, len(pieces))]
    (folder / "vocab.json").write_text(json.dumps({piece: n for n, piece in enumerate(SPECIALS + own)}))
    scored = [(piece, -float(n)) for n, piece in enumerate(SPECIALS + own)]
    letters = sorted({letter for piece in own for letter in piece})
    made = {
        "m2m": hf.M2M100Tokenizer(str(folder / "vocab.json"), str(folder / "it.model")),
        "nllb": hf.NllbTokenizer(vocab={piece: n for n, piece in enumerate(SPECIALS + letters)}, merges=[]),
        "mbart": hf.MBart50Tokenizer(vocab=scored),
    }
    for name, tokenizer in made.items():
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 256}
        config = hf.MBartConfig if name == "mbart" else hf.M2M100Config
        whole = config(**SIZES, **heads, vocab_size=400, decoder_start_token_id=2)
        kind = hf.MBartForConditionalGeneration if name == "mbart" else hf.M2M100ForConditionalGeneration
        kind(whole).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize("name", CODES)
def test_a_multilingual_model_aligns_in_both_directions(name, models, text):
    given = models / name, text / "s", text / "t", "--languages", CODES[name]
    for more in (["--reverse", models / name], ["--by", "encoder"]):
        done = cli(*given, *more)
        assert done.exit_code == 0, done.output
        assert done.stdout.count("\n") == 20


@pytest.mark.parametrize("name", CODES)
def test_the_code_belongs_to_no_word(name, models):
    tokenizer = hf.AutoTokenizer.from_pretrained(models / name)
    sides = [
        WordTokenizer.open(tokenizer, side, name, Languages(*CODES[name].split("-")))
        for side in ("text", "text_target")
    ]
    encoded = [side.encode([["a", "b"], []]) for side in sides]
    assert encoded[0].ids[0][0] != encoded[1].ids[0][0]
    for lines in encoded:
        assert lines.owners[0][0] == lines.owners[0][-1] == NOWHERE
        assert {*lines.owners[0]} == {0, 1, NOWHERE}
        assert lines.owners[1] == []


@pytest.mark.parametrize("name", CODES)
def test_languages_that_are_missing_or_unknown_get_one_line(name, models, text):
    given = models / name, text / "s", text / "t"
    assert "translates between many languages" in str(cli(*given).exception)
    assert "has no language code 'zz'" in str(cli(*given, "--languages", "zz-" + CODES[name].split("-")[1]).exception)
