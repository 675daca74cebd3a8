"""Work of one step of beam search: operators that compute, and bytes that they read and write, counted on a CPU.

    python benchmarks/decoding_work.py [--attention softmax,coda] [--batch 128] [--size iwslt14] [--positions 32]

The step is the one that a GPU captures and replays, with the definitions in place of kernels. It runs on tensors
without values, in bf16, so it takes seconds at any size. Views are free. An operator reads each input once and writes
each output once; one that changes a tensor in place at some places counts only those.
"""

import argparse
from collections import Counter
from dataclasses import replace

import measuring
import torch
from decoding import BEAM, SIZES
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnlab.decoding.decode import Session
from attnlab.decoding.search import Rules
from attnlab.models.transformer import build

SPARSE = ("index_copy_", "index_select", "gather", "embedding", "index.Tensor")  # touch no more than what they write


class WorkCounter(TorchDispatchMode):
    """Counts operators and bytes by name."""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        name = function.name().removeprefix("aten::")
        if function.is_view or name.startswith(("prim::", "_unsafe_view")):
            return output
        read, written = (list_tensors(x) for x in ((args, kwargs), output))
        touched = [x for x in read if not any(x is y for y in written)] + written
        if any(name.startswith(sparse) for sparse in SPARSE):
            least = min(read if name.startswith("index_copy_") else written, key=count_bytes)
            touched = [least, least]
        self.calls[name] += 1
        self.bytes[name] += sum(map(count_bytes, touched))
        return output


def list_tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.dim()]


def count_bytes(x):
    """Bytes of the entries that differ: an expanded dimension counts once."""
    places = [n for n, stride in zip(x.shape, x.stride(), strict=True) if stride]
    return torch.Size(places).numel() * x.element_size()


def count_step(config, batch, source, positions):
    """Count one step of a session whose hypotheses see this number of positions."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with FakeTensorMode(), torch.no_grad():
        model = build(config).eval()
        session = Session(model, Rules(beam=BEAM), batch, source, positions, torch.device("cpu"), captured=False)
        session.begin()
        step = session._get_step(positions)
        with WorkCounter() as counter:
            step()
    torch.set_default_dtype(before)
    return counter


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="iwslt14")
    parser.add_argument("--attention", default="softmax,coda,dagpam", help="comma-separated mechanisms")
    parser.add_argument("--batch", type=int, default=128, help="number of sentences")
    parser.add_argument("--source", type=int, default=32, help="tokens of a source")
    parser.add_argument("--positions", type=int, default=32, help="positions of the caches")
    parser.add_argument("--top", type=int, default=8, help="operators to list, those of the most bytes")
    given = parser.parse_args()
    for name in given.attention.split(","):
        counter = count_step(replace(SIZES[given.size], attention=name), given.batch, given.source, given.positions)
        print(f"{name}: {counter.calls.total():,} operators, {counter.bytes.total() / 1e6:,.0f} MB")
        rows = [[key, counter.calls[key], size / 1e6] for key, size in counter.bytes.most_common(given.top)]
        print(measuring.format_table(["operator", "calls", "MB"], rows))


if __name__ == "__main__":
    main()
