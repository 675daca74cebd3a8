"""attnlab align with Hugging Face models: which word a token belongs to, and links against one pair at a time."""

import logging
import re

import pytest
import tiny_models
import torch
from aligned_text import cli, slow_links, write_pairs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import attnlab
from attnlab.aligning.choice import Candidate
from attnlab.aligning.extraction import find_links
from attnlab.aligning.pair_readers import open_pretrained_reader
from attnlab.aligning.word_tokens import Languages, WordTokenizer, find_owners
from attnlab.analysis.alignment import NOWHERE

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("text"))


def bpe(lines):
    """A fast tokenizer with pieces of words, ▁ before each word and </s> at the end."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<pad>", "<eos>", "<unk>"]
    made.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=90, special_tokens=special))
    made.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    names = {"unk_token": "<unk>", "eos_token": "<eos>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def test_tokens_of_a_fast_tokenizer_are_those_of_their_word(text):
    _, source, _, _ = text
    tokenizer = bpe([" ".join(words) for words in source])
    found = find_owners(tokenizer, source, "text", "it")
    assert max(len(of) - len(words) for of, words in zip(found, source, strict=True)) > 3
    for words, of in zip(source, found, strict=True):
        pieces = tokenizer.convert_ids_to_tokens(tokenizer(" ".join(words))["input_ids"])
        assert of[-1] == NOWHERE
        for number, word in enumerate(words):
            assert "".join(p for p, owner in zip(pieces, of, strict=True) if owner == number).strip("▁") == word


class Slow:
    """A tokenizer without offsets: ▁ and a letter, then two letters a piece; <unk> for ?; </s> at the end."""

    is_fast, all_special_ids, unk_token_id = False, [0, 1], 1

    def __init__(self, space="▁"):
        self.space, self.pieces = space, ["</s>", "<unk>"]

    def __call__(self, text_target, add_special_tokens=True):
        if isinstance(text_target, list):
            return {"input_ids": [self(line, add_special_tokens)["input_ids"] for line in text_target]}
        cut = re.findall("▁.|[^▁]{1,2}", "▁" + text_target.replace(" ", self.space))
        self.pieces += [piece for piece in cut if piece not in self.pieces]
        return {"input_ids": [1 if "?" in p else self.pieces.index(p) for p in cut] + [0] * add_special_tokens}

    def convert_ids_to_tokens(self, ids):
        return [self.pieces[token] for token in ids]


def test_tokens_of_a_tokenizer_without_offsets():
    assert find_owners(Slow(), [["abcd", "?", "e"], []], "text_target", "it") == [[0, 0, 0, 1, 2, NOWHERE], []]
    with pytest.raises(ValueError, match=r"line 1: .*'abc de'"):
        find_owners(Slow(space=""), [["abc", "de"]], "text_target", "it")


def test_a_long_line_is_tokenized_without_a_warning(caplog):
    tokenizer = bpe(["a b"])
    tokenizer.model_max_length = 8
    side, logger = WordTokenizer.open(tokenizer, "text", "it", Languages()), logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    side.encode([["a"] * 20])
    logger.removeHandler(caplog.handler)
    assert caplog.messages == []


@pytest.mark.parametrize("make", [tiny_models.marian, tiny_models.t5])
def test_a_hugging_face_model_aligns_as_one_pair_at_a_time(make, text, tmp_path):
    folder, source, target, _ = text
    tokenizer = bpe([" ".join(words) for words in source + target])
    make().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    asked = Candidate("norm", "awo", 1, "mean")
    pairs = source[:7], target[:7]
    reader = open_pretrained_reader(str(tmp_path), *pairs, device=CPU)
    made = find_links(reader, lambda layers, heads: [asked]).aligned[asked].links()
    for number, (x, y) in enumerate(zip(*pairs, strict=True)):
        if not y:
            continue
        found = attnlab.record(str(tmp_path), " ".join(x), target=" ".join(y)).kind("cross")[1]
        vectors = torch.einsum("bhij,bhjd,hde->bije", found.weights, found.values, found.output_weight)
        sizes = [[len(tokenizer(word)["input_ids"]) - 1 for word in words] for words in (x, y)]
        assert made[number] == slow_links(vectors.norm(dim=-1)[0], *sizes, "awo", False)
    done = cli(tmp_path, folder / "s", folder / "t", "--by", "weight")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("\n") == 20
