"""The tokens of a record are text, also of tokenizers that write bytes as letters."""

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from attnlab.analysis.words import join_pieces, number_words
from attnlab.huggingface.inputs import decode_pieces

TEXT = "Käse schläft — “on” the café … 🧀 naïve\nthe\tend"


def byte_level():
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    raw.train_from_iterator([TEXT.replace("🧀", "")] * 9, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|endoftext|>")


def test_bytes_are_written_as_the_letters_they_are_and_marks_stay():
    tokenizer = byte_level()
    ids = torch.tensor([tokenizer(TEXT)["input_ids"] + [0]])
    (found,) = decode_pieces(tokenizer, ids)
    assert {"ĠcafÃ©", "ĠâĢĶ"} <= set(tokenizer.convert_ids_to_tokens(ids[0]))  # as they are written in the vocabulary
    assert {"Käse", "Ġschläft", "Ġ—", "Ġcafé", "Ġ…", "<|endoftext|>"} <= set(found)
    assert {"Ċ", "ĉ"} <= {piece[0] for piece in found}  # what cannot be printed stays as it was
    assert not any(character in piece for piece in found for character in ("\ufffd", "\n", "\t"))
    assert "café" in join_pieces(found, number_words(found))


@pytest.mark.parametrize("piece", ["▁Käse", "##s", "[CLS]", "Ġ"])
def test_pieces_of_other_tokenizers_are_left_as_they_are(piece):
    raw = Tokenizer(models.WordLevel({piece: 0}, unk_token=piece))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw)
    assert decode_pieces(tokenizer, torch.tensor([[0, 0]])) == [[piece, piece]]
