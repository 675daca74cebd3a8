"""The tokens of a record are text, also of tokenizers that write bytes as letters."""

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import attnlab
from attnlab.analysis.words import join_pieces, number_words
from attnlab.huggingface.inputs import show_tokens
from attnlab.records.pieces import show_pieces
from attnlab.tasks.vocabulary import Bytes, Characters, Pretrained, is_byte_level

TEXT = "Käse schläft — “on” the café … 🧀 naïve\nthe\tend"


def byte_level():
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    raw.train_from_iterator([TEXT.replace("🧀", "")] * 9, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|endoftext|>")


def join_words(pieces):
    return join_pieces(pieces, number_words(pieces))


def test_bytes_are_shown_as_the_letters_they_are():
    tokenizer = byte_level()
    ids = tokenizer(TEXT)["input_ids"] + [0]
    shown = show_tokens(tokenizer, ids)
    assert {"ĠcafÃ©", "ĠâĢĶ"} <= set(tokenizer.convert_ids_to_tokens(ids))  # as they are written in the vocabulary
    assert {"Käse", "▁schläft", "▁—", "▁café", "▁…", "<|endoftext|>", "⏎", "⇥"} <= set(shown)
    assert [piece for piece in shown if "🧀" in piece] == [f"🧀⟨{n}/4⟩" for n in range(1, 5)]
    assert join_words(shown) == [*TEXT.replace("\n", " ⏎ ").replace("\t", " ⇥ ").split(), "<|endoftext|>"]


@pytest.mark.parametrize("text", ["東京は日本の首都です。", "Grüße 👩‍🚀❤️ из Köln", "हिन्दी می‌خواهم"])
def test_words_of_shown_bytes_are_the_words_of_the_text(text):
    shown = show_tokens(tokenizer := byte_level(), tokenizer(text)["input_ids"])
    assert "".join(join_words(shown)) == text.replace(" ", "")
    assert not any(letter in "".join(shown) for letter in "Ġ\ufffd\u200d\u200c")


def test_bytes_that_are_no_character_are_shown_as_numbers():
    assert show_pieces(["æĿ", "±", "Ã", "ĠæĿ"], byte_level=True) == ["東⟨1/2⟩", "東⟨2/2⟩", "⟨C3⟩", "▁⟨E6 9D⟩"]


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (["▁Käse", "s", "</s>"], ["▁Käse", "s", "</s>"]),
        (["[CLS]", "un", "##do", "[SEP]"], ["[CLS]", "un", "##do", "[SEP]"]),
        (["▁", "<0xF0>", "<0x9F>", "<0x8E>", "<0x89>"], ["▁", *(f"🎉⟨{n}/4⟩" for n in range(1, 5))]),
        (["th@@", "e", "cat"], ["th", "##e", "cat"]),
        (["<s>", "th", "e</w>", "cat</w>", "</s>"], ["<s>", "th", "##e", "cat", "</s>"]),
        (["▁a", "@@", "##"], ["▁a", "@@", "##"]),
        (["a b", "c\nd"], ["a▁b", "c⏎d"]),
        ([], []),
    ],
)
def test_pieces_of_other_tokenizers_have_the_same_marks(pieces, shown):
    assert show_pieces(pieces, plain=("<s>", "</s>")) == shown


@pytest.mark.parametrize("piece", ["▁Käse", "##s", "[CLS]", "Ġ"])
def test_pieces_without_bytes_are_left_as_they_are(piece):
    raw = Tokenizer(models.WordLevel({piece: 0}, unk_token=piece))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw)
    assert not is_byte_level(tokenizer)
    assert show_tokens(tokenizer, [0, 0]) == [piece, piece]


def test_a_decoder_made_of_several_is_byte_level_if_one_is():
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()])
    assert is_byte_level(tokenizer)


def test_a_record_holds_what_is_shown_and_the_ids():
    tokenizer = byte_level()
    sizes = {"n_embd": 15, "n_head": 3, "n_layer": 1, "n_positions": 32, "vocab_size": 400}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, attn_implementation="eager")).eval()
    record = attnlab.record(model, "Käse schläft", tokenizer=tokenizer)
    assert record.words["target"] == [["Käse", "▁schläft"]]
    assert record.tokens["target"].tolist() == [tokenizer("Käse schläft")["input_ids"]]
    assert set(attnlab.contribution(record)["key_token"]) == {"Käse", "▁schläft"}


def test_vocabularies_of_runs_show_the_same():
    own = Pretrained(byte_level().backend_tokenizer.to_str())
    (encoded,) = own.encode(["Käse schläft\n🧀"])
    assert own.show_tokens([1, *encoded])[:4] == ["<s>", "Käse", "▁schläft", "⏎"]
    assert own.show_tokens(encoded)[-1] == "🧀⟨4/4⟩"
    characters = Characters([" ", "\n", "ä"])
    assert characters.show_tokens([2, *next(characters.encode(["ä \n"]))]) == ["</s>", "ä", "▁", "⏎"]
    raw = Bytes([chr(byte) for byte in range(256)])
    assert raw.show_tokens([2, *next(raw.encode(["Ã¤ x"]))]) == ["</s>", "ä⟨1/2⟩", "ä⟨2/2⟩", "▁", "x"]
