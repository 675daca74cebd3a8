"""Joey NMT's training step as a program that training.py times in turns; it runs in Joey NMT's environment.

    /path/to/joey/bin/python benchmarks/joey_step.py '{"width": 512, …}'      the sizes, named as a TransformerConfig's

Its configuration builds the model, the smoothed loss and Adam. A step is that of its trainer, without sorting. Its
configuration has one dropout per layer; the dropouts of attention weights and feed-forward activations are set
afterwards, so that all programs have the same dropouts.
"""

import json
import sys
from importlib.metadata import version
from types import SimpleNamespace

import torch
from alternating import serve_steps
from joeynmt.batch import Batch
from joeynmt.builders import build_optimizer
from joeynmt.model import build_model
from joeynmt.transformer_layers import MultiHeadedAttention, PositionwiseFeedForward
from joeynmt.vocabulary import Vocabulary

LENGTH, SEED = 32, 0
PAD, EOS, SPECIAL = 1, 3, 4
SYMBOLS = SimpleNamespace(
    unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>", sep_token=None, lang_tags=[],
    unk_id=0, pad_id=PAD, bos_id=2, eos_id=EOS, sep_id=None,
)  # fmt: skip


def build_joey(sizes):
    side = {
        "type": "transformer", "num_heads": sizes["heads"], "hidden_size": sizes["width"],
        "ff_size": sizes["feed_forward"], "dropout": sizes["dropout"], "layer_norm": sizes["norm"],
        "embeddings": {"embedding_dim": sizes["width"], "scale": sizes["embedding_scale"]},
    }  # fmt: skip
    config = {
        "encoder": side | {"num_layers": sizes["layers"]},
        "decoder": side | {"num_layers": sizes["decoder_layers"] or sizes["layers"]},
        "tied_softmax": sizes["tie"] == "output",
    }
    words = [
        Vocabulary([f"word{n}" for n in range(size - SPECIAL)], SYMBOLS)
        for size in (sizes["vocabulary"], sizes["target_vocabulary"])
    ]
    model = build_model(config, *words).train()
    model.loss_function = ("crossentropy", 0.1)
    for module in model.modules():
        if isinstance(module, MultiHeadedAttention):
            module.dropout.p = sizes["attention_dropout"]
        elif isinstance(module, PositionwiseFeedForward):
            module.pwff_layer[2].p = sizes["activation_dropout"]
    return model


def make_batch(tokens):
    """Return a batch of `tokens` inputs and targets, in Joey NMT sequences of LENGTH + 1, without padding."""
    torch.manual_seed(SEED)
    rows = tokens // LENGTH
    source, target = torch.randint(SPECIAL, 6000, (rows, LENGTH)), torch.randint(SPECIAL, 6000, (rows, LENGTH + 1))
    target[:, -1] = EOS
    lengths = torch.full((rows,), LENGTH)
    batch = Batch(source, lengths, None, target, None, torch.arange(rows), torch.device("cpu"), PAD, EOS)
    if batch.ntokens != tokens or batch.trg_input.shape != (rows, LENGTH):
        raise ValueError(f"Joey NMT must have {tokens} target tokens, got {batch.ntokens}")
    return batch


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = build_joey(json.loads(sys.argv[1]))
    optimizer = build_optimizer(
        {"optimizer": "adam", "learning_rate": 1e-4, "adam_betas": (0.9, 0.98)}, model.parameters()
    )

    def step_of(tokens, steps):
        data = make_batch(tokens)

        def step():
            total = 0.0
            for _ in range(steps):
                summed, _, _, _ = model(return_type="loss", **vars(data))
                loss = data.normalize(summed, normalization="tokens")
                loss.backward()
                optimizer.step()
                model.zero_grad()
                total += loss.item()
            return total / steps

        return step

    versions = ", ".join(f"{name} {version(name)}" for name in ("joeynmt", "torch"))
    serve_steps({"parameters": sum(p.numel() for p in model.parameters()), "version": versions}, step_of)


if __name__ == "__main__":
    main()
