"""Write the vocabulary of a task as a tokenizer that transformers loads.

    subwords of a translator       MarianTokenizer: the SentencePiece models themselves, and the ids of their pieces
    subwords of a language model   the same pieces in a tokenizer.json, unigram or BPE, with SentencePiece's normaliser
    words, characters, bytes       a tokenizer.json that looks each of them up
    a pretrained tokenizer         its tokenizer.json with all ids shifted by 4

A text gets the ids that the task gives it: a language model's begins with </s>, a source ends with </s>. The written
tokenizer is compared with the task on texts made of its own tokens. Nothing here imports transformers.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from attnlab.huggingface import pretrained
from attnlab.records.pieces import BYTE_OF_LETTER
from attnlab.tasks.task import BOS, EOS, PAD, SPECIALS, UNK
from attnlab.tasks.vocabulary import Bytes, Characters, Pretrained, Subwords, Vocabulary, Words

SAMPLES, LENGTH = 200, 12  # texts in the comparison, and tokens of each
TRICKY = ("two  spaces ", "ﬁ ½ é e\u0301 日本 🙂", "x\u00a0y", "UPPER lower")
BEGIN, END, UNKNOWN, PADDING = SPECIALS[BOS], SPECIALS[EOS], SPECIALS[UNK], SPECIALS[PAD]


def write_tokenizer(task: Any, folder: Path) -> str:
    """Add the files of a task's tokenizer to a model's folder. Return why there are none, or "" if they are written."""
    is_translation = task.architecture == "translation"
    sides = ("source_vocabulary", "target_vocabulary") if is_translation else ("vocabulary", "vocabulary")
    source, target = (getattr(task, side, None) for side in sides)
    if not isinstance(source, Vocabulary) or not isinstance(target, Vocabulary) or not hasattr(task, "encode"):
        return "the task has no text"
    if _is_set(task, "moses"):
        return "moses=true splits the text before the vocabulary does"
    before = set(folder.iterdir())
    changes = not is_translation or _is_set(task, "lower") or _is_set(task, "source_begin")
    if isinstance(source, Subwords) and isinstance(target, Subwords) and not changes:
        _write_marian(source, target, folder)
    elif _list_tokens(source) != _list_tokens(target):
        return "source and target have different vocabularies"
    else:
        _write_json(task, source, folder, is_translation)
    text = _find_difference(task, source, folder)
    if text is None:
        return ""
    for file in set(folder.iterdir()) - before:
        file.unlink()
    return f"transformers would split {text!r} differently from the vocabulary"


def _write_marian(source: Subwords, target: Subwords, folder: Path) -> None:
    """Write the files of MarianTokenizer."""
    separate = source.model != target.model
    for name, vocabulary in (("source", source), ("target", target)):
        (folder / f"{name}.spm").write_bytes(vocabulary.model)
    for name, vocabulary in (("vocab", source), *((("target_vocab", target),) if separate else ())):
        ids = {token: number for number, token in enumerate(_list_tokens(vocabulary))}
        (folder / f"{name}.json").write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
    about = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": separate}
    about |= {"eos_token": END, "unk_token": UNKNOWN, "pad_token": PADDING}
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def _write_json(task: Any, vocabulary: Vocabulary, folder: Path, is_translation: bool) -> None:
    """Write a tokenizer.json."""
    tokenizer = BUILDERS[type(vocabulary)](vocabulary)
    if _is_set(task, "lower"):
        rest = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *rest])
    begin, end, unknown, padding = (str(tokenizer.id_to_token(number)) for number in (BOS, EOS, UNK, PAD))
    template = f"{begin} $A {end}" if _is_set(task, "source_begin") else f"$A {end}"
    template, begin = (template, begin) if is_translation else (f"{end} $A", end)
    special = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((begin, end))]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    names = {"bos_token": begin, "eos_token": end, "unk_token": unknown, "pad_token": padding}
    pretrained.find_class("PreTrainedTokenizerFast")(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def _find_difference(task: Any, vocabulary: Vocabulary, folder: Path) -> str | None:
    """Return a text that the written tokenizer encodes differently from the task, or None."""
    tokenizer, draw = pretrained.open_tokenizer(str(folder)), random.Random(0)
    numbers = range(len(SPECIALS), len(vocabulary))
    samples = [vocabulary.decode(draw.choices(numbers, k=LENGTH)) for _ in range(SAMPLES)]
    for text in (*TRICKY, *samples):
        if tokenizer(text)["input_ids"] != task.encode([text]).ids.tolist():
            return text
    return None


def _build_subwords(vocabulary: Any) -> Tokenizer:
    from sentencepiece import sentencepiece_model_pb2

    spm: Any = sentencepiece_model_pb2
    proto = spm.ModelProto.FromString(vocabulary.model)
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    if proto.trainer_spec.model_type == spm.TrainerSpec.BPE:
        ids = {piece: number for number, (piece, _) in enumerate(pieces)}
        tokenizer = Tokenizer(models.BPE(ids, _list_merges(ids), unk_token=UNKNOWN, fuse_unk=True))
    else:
        tokenizer = Tokenizer(models.Unigram(pieces, unk_id=UNK))
    charsmap = normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap)
    spaces = [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence([charsmap, *spaces])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return tokenizer


def _list_merges(ids: dict[str, int]) -> list[tuple[str, str]]:
    """Return the pairs of pieces that make a piece, in the order in which the pieces were learned."""
    merges = []
    for piece, number in ids.items():
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        merges += [(number, pair) for pair in pairs if pair[0] in ids and pair[1] in ids]
    return [pair for _, pair in sorted(merges)]


def _build_words(vocabulary: Vocabulary) -> Tokenizer:
    tokenizer = _build_lookup(_list_tokens(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def _build_characters(vocabulary: Vocabulary) -> Tokenizer:
    tokenizer = _build_lookup(_list_tokens(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _build_bytes(vocabulary: Vocabulary) -> Tokenizer:
    """Build a tokenizer that writes each byte as a letter, as GPT-2 does, and looks the letters up."""
    letters = {chr(byte): letter for letter, byte in BYTE_OF_LETTER.items()}
    tokenizer = _build_lookup([letters.get(token, token) for token in _list_tokens(vocabulary)])
    as_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([as_letters, pre_tokenizers.Split(Regex("."), "isolated")])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _build_lookup(tokens: list[str]) -> Tokenizer:
    ids = {token: number for number, token in enumerate(tokens)}
    return Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))


def _build_shifted(vocabulary: Any) -> Tokenizer:
    """Shift the ids of a pretrained tokenizer. A special token of ours that it has too gets another name."""
    values = json.loads(vocabulary.tokenizer.to_str())
    known = vocabulary.tokenizer.get_vocab()
    ours = [f"<attnlab-{token.strip('<>')}>" if token in known else token for token in SPECIALS]
    old, model = values["model"]["vocab"], values["model"]
    if isinstance(old, list):  # unigram: pieces with scores
        model["vocab"] = [[token, 0.0] for token in ours] + old
        model["unk_id"] = None if model["unk_id"] is None else model["unk_id"] + len(ours)
    else:
        model["vocab"] = {token: number for number, token in enumerate(ours)}
        model["vocab"] |= {token: number + len(ours) for token, number in old.items()}
    plain = [token for token in values["added_tokens"] if not token["special"]]
    values["added_tokens"] = [token | {"id": token["id"] + len(ours)} for token in plain]
    values |= {"post_processor": None, "truncation": None, "padding": None}
    return Tokenizer.from_str(json.dumps(values))


def _is_set(task: Any, key: str) -> bool:
    return bool(getattr(task.config, key, False))


def _list_tokens(vocabulary: Vocabulary) -> list[str]:
    return vocabulary.get_tokens(range(len(vocabulary)))


BUILDERS: dict[type, Callable[[Any], Tokenizer]] = {
    Subwords: _build_subwords, Words: _build_words, Characters: _build_characters, Bytes: _build_bytes,
    Pretrained: _build_shifted,
}  # fmt: skip
