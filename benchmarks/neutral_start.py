"""What each mechanism does to a pretrained language model before training: its loss, by default and at neutral start.

    python benchmarks/neutral_start.py FOLDER TEXT [--tokens 512] [--windows 4]

loss is in nats per token, over windows of the text. A neutral start leaves the model as it was.
"""

import argparse
import csv
import sys
from pathlib import Path

import torch

import attnlab
from attnlab.huggingface import pretrained
from attnlab.huggingface.neutral import NEUTRAL
from attnlab.mechanisms import MECHANISMS


@torch.no_grad()
def measure_loss(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """Return the mean loss of windows (w,n), one at a time."""
    losses = [model(window[None], labels=window[None], use_cache=False).loss.item() for window in ids]
    return sum(losses) / len(losses)


def measure_start(folder: str, ids: torch.Tensor, name: str | None, neutral: bool) -> float | str:
    """Return the loss of the model with a mechanism, or why it cannot have it."""
    torch.manual_seed(0)
    model = pretrained.open_model(folder, dtype=torch.float32)
    try:
        if name is not None:
            attnlab.adapt(model, name, neutral=neutral)
        return measure_loss(model, ids)
    except ValueError as error:
        return str(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--windows", type=int, default=4)
    given = parser.parse_args()
    tokenizer = pretrained.open_tokenizer(given.folder)
    read = tokenizer(given.text.read_text(encoding="utf-8")[: 20 * given.tokens * given.windows])["input_ids"]
    ids = torch.tensor(read[: given.tokens * given.windows]).view(given.windows, given.tokens)
    out = csv.writer(sys.stdout)
    out.writerow(["attention", "loss_default_nats", "loss_neutral_nats", "neutral_options"])
    out.writerow(["(the model itself)", f"{measure_start(given.folder, ids, None, False):.4f}", "", ""])
    for name in MECHANISMS:
        losses = [measure_start(given.folder, ids, name, neutral=False)]
        losses.append(measure_start(given.folder, ids, name, neutral=True) if name in NEUTRAL else "")
        options = NEUTRAL[name].options if name in NEUTRAL else {}
        shown = [f"{loss:.4f}" if isinstance(loss, float) else loss for loss in losses]
        out.writerow([name, *shown, " ".join(f"{key}={value}" for key, value in options.items())])
        sys.stdout.flush()


if __name__ == "__main__":
    main()
