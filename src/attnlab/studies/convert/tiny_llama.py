"""The model of the smoke scale: a tiny Llama, built in memory and trained for some seconds on an artificial language.

A model at random initialization predicts the same with any attention. This one has learned to use its own.
"""

from pathlib import Path
from typing import Any

import torch

from attnlab.experiments.corpora import write_artificial_text
from attnlab.files import replace_file
from attnlab.files.user_files import read_text
from attnlab.huggingface.pretrained import find_class, silence_transformers

NAME = "tiny-llama"
TEXT = "artificial language"  # its label in tables
SPECIAL = ("<eos>", "<unk>")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": 0, "bos_token_id": 0}  # fmt: skip
UPDATES, BATCH, LENGTH = 150, 8, 32


def write_tiny_llama(folder: Path, text: Path) -> None:
    """Write the text, train the model on it, and save it with its tokenizer, unless that is done."""
    write_artificial_text(text)
    if folder.is_dir():
        return
    lines = read_text(text / "train.txt")
    tokenizer = build_tokenizer(lines)
    torch.manual_seed(0)
    config = find_class("LlamaConfig")(vocab_size=len(tokenizer), **SIZES)
    model = train_model(find_class("LlamaForCausalLM")(config), torch.tensor(tokenizer(lines)["input_ids"]))
    with silence_transformers(), replace_file(folder) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)


def build_tokenizer(text: str) -> Any:
    """Return a tokenizer of the words of a text, split at spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate([*SPECIAL, *sorted(set(text.split()))])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return find_class("PreTrainedTokenizerFast")(tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>")


def train_model(model: Any, ids: torch.Tensor) -> Any:
    """Train all weights of a model on random windows of token ids (n,)."""
    optimizer, draw = torch.optim.Adam(model.parameters(), 1e-2), torch.Generator().manual_seed(0)
    for _ in range(UPDATES):
        starts = torch.randint(len(ids) - LENGTH, (BATCH, 1), generator=draw)
        batch = ids[starts + torch.arange(LENGTH)]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()
