"""Beam search with beam 5: sentences per second, beside `generate` of a Marian of the same size in the same run.

    python benchmarks/decoding.py [--out results/decoding] [--batch 32,128] [--attention softmax,coda] [--size iwslt14]
                                  [--resume]
    python benchmarks/decoding.py --ctranslate2 [--dtype float32,bfloat16]        on a CPU with ctranslate2 installed

All models have random weights and generate the same number of tokens for every sentence. Sources have between half
and all of the length --source. On a GPU: bf16, our search captured, wall-clock time from source to tokens. On a CPU:
float32, one thread, our search plain, processor time, which other programs change less. All take turns; the result is
the median over batches. The time of the first batch, with capturing, is shown separately. Times are printed only if the
timed search first equals the plain one, in float64, on sentences of any length.

--ctranslate2 adds CTranslate2 with the weights of our softmax model, in float32 and in int8. In float32 its greedy
outputs must first equal ours. Its beam search has other rules: it renormalises over the words that are allowed. So all
outputs have the same forced length, and the times are of equal numbers of steps.
"""

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from importlib.metadata import version
from itertools import product

import measuring
import torch

from attnlab.decoding.decode import BeamSearch, Session, decode_greedy, search_plain
from attnlab.decoding.search import Rules
from attnlab.models.presets import PRESETS
from attnlab.models.transformer import build

SEED = 0
BEAM = 5
SIZES = {
    "iwslt14": replace(PRESETS["iwslt14"], target_vocabulary=None),  # Marian's search needs equal vocabulary sizes
    "tiny": replace(
        PRESETS["iwslt14"], vocabulary=211, target_vocabulary=None, layers=2, width=32, heads=2, feed_forward=64
    ),
}
PAD, BOS, EOS = 0, 1, 2


def draw_sources(batch, config, device, longest):
    """Draw sentences of half to all of the longest length, padded on the right."""
    source = torch.randint(3, config.vocabulary, (batch, longest), device=device)
    lengths = torch.randint(longest // 2, longest + 1, (batch, 1), device=device)
    lengths[0] = longest
    return source.masked_fill(torch.arange(longest, device=device) >= lengths, PAD)


def build_marian(config, device, dtype):
    """Build Hugging Face's Marian with the layers, widths and vocabularies of config."""
    from transformers import MarianConfig, MarianMTModel

    layers, heads, inner = config.layers, config.heads, config.feed_forward
    options = MarianConfig(
        vocab_size=config.vocabulary, d_model=config.width, encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=heads, decoder_attention_heads=heads, encoder_ffn_dim=inner, decoder_ffn_dim=inner,
        activation_function="relu", max_position_embeddings=512, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
        forced_eos_token_id=None, decoder_start_token_id=BOS,
    )  # fmt: skip
    return MarianMTModel(options).eval().to(device=device, dtype=dtype)


def make_generate(model, tokens):
    def generate(source):
        output = model.generate(
            input_ids=source, attention_mask=(source != PAD).long(), num_beams=BEAM, do_sample=False,
            max_new_tokens=tokens, min_new_tokens=tokens,
        )  # fmt: skip
        if output.shape[1] != tokens + 1:
            raise ValueError(f"generate must return {tokens} tokens, got {output.shape[1] - 1}")
        return output.tolist()

    return generate


def make_search(model, tokens, captured):
    search = BeamSearch(model, beam=BEAM, max_length=tokens, min_length=tokens, captured=captured)

    def decode(source):
        decoded = search(source)
        if decoded.captured != captured or decoded.steps != tokens:
            expected = f"expected captured={captured} in {tokens} steps"
            raise ValueError(f"{expected}, got captured={decoded.captured} in {decoded.steps} steps")
        return [hypothesis.tokens for hypothesis in decoded.best]

    return decode


@torch.no_grad()
def check_equal(model, config, device):
    """Check in float64 that the timed search finds what the plain search finds; twice, so that graphs are replayed."""
    rules = Rules(beam=BEAM, n_best=2, max_length=40)
    room = Session(model, rules, 8, 16, 64, device, captured=device.type == "cuda")
    for _ in range(3):
        source = draw_sources(8, config, device, 16)
        limits = rules.compute_limits(source)
        got, expected = room.run(source, limits), search_plain(model, rules, source, limits)
        for ours, theirs in zip(got.hypotheses, expected.hypotheses, strict=True):
            if [h.tokens for h in ours] != [h.tokens for h in theirs]:
                raise ValueError("the captured search and the plain one differ in their tokens")
            if max(abs(a.score - b.score) for a, b in zip(ours, theirs, strict=True)) > 1e-9:
                raise ValueError("the captured search and the plain one differ in their scores")


def build_peers(model, config, tokens):
    """Build CTranslate2's models with these weights, and check that the one in float32 decodes greedily as ours."""
    import ctranslate2_peer

    with tempfile.TemporaryDirectory() as folder:
        peers = ctranslate2_peer.build_peers(model, config, folder)
    source = draw_sources(4, config, torch.device("cpu"), 20)
    ours = decode_greedy(model, source, max_length=tokens, min_length=tokens).best
    theirs = peers["float32"].decode(source, beam=1, tokens=tokens)
    if any(a.tokens[:-1] != b[:-1] for a, b in zip(ours, theirs, strict=True)):  # our last token is eos
        raise ValueError("CTranslate2 in float32 and our model differ in their greedy outputs")
    return {
        f"ctranslate2_{name}": (lambda source, peer=peer: peer.decode(source, beam=BEAM, tokens=tokens))
        for name, peer in peers.items()
    }


def measure_seconds(run, source):
    if not source.is_cuda:
        start = time.process_time()
        run(source)
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    run(source)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def compare_speeds(ours, peers, batch, config, device, longest, repeats):
    """Return the seconds of our first batch, and the median seconds per batch of ours and of each peer, by name."""
    runs = {"ours": ours} | peers
    first, times = measure_seconds(ours, draw_sources(batch, config, device, longest)), {name: [] for name in runs}
    for _ in range(2):
        for run in runs.values():
            run(draw_sources(batch, config, device, longest))
    for _ in range(repeats):
        source = draw_sources(batch, config, device, longest)
        for name, run in runs.items():
            times[name].append(measure_seconds(run, source))
    return first, {name: statistics.median(taken) for name, taken in times.items()}


def measure_all(given, device, sheet):
    """Yield the rows that the sheet lacks."""
    config, captured = SIZES[given.size], device.type == "cuda"
    default = torch.bfloat16 if captured else torch.float32
    about = {"size": given.size, "beam": BEAM, "tokens": given.tokens, "captured": captured}
    kinds = product(given.attention, given.dtype, given.batch)
    rows = [about | dict(zip(("attention", "dtype", "batch"), kind, strict=True)) for kind in kinds]
    rows = [row for row in rows if sheet.lacks(row)]
    marian = make_generate(build_marian(config, device, default), given.tokens) if rows else None
    for name in dict.fromkeys(row["attention"] for row in rows):
        torch.manual_seed(SEED)
        model = build(replace(config, attention=name)).eval()
        peers = {"marian": marian}
        if given.ctranslate2 and name == "softmax":
            peers |= build_peers(model, config, given.tokens)
        check_equal(model.to(device).double(), config, device)
        for row in rows:
            if row["attention"] != name:
                continue
            ours = make_search(model.to(getattr(torch, row["dtype"])), given.tokens, captured)
            batch = row["batch"]
            first, seconds = compare_speeds(ours, peers, batch, config, device, given.source, given.repeats)
            mine = seconds.pop("ours")
            row |= {"sentences_per_s": batch / mine, "first_batch_s": first}
            for peer, taken in seconds.items():
                row |= {f"{peer}_sentences_per_s": batch / taken, f"times_{peer}": taken / mine}
            yield row


def identify(row):
    """Return what a row is about."""
    return [row.get(key) for key in ("attention", "size", "beam", "tokens", "dtype", "batch")]


def main():
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="iwslt14")
    parser.add_argument("--attention", default="softmax,coda,dagpam", help="comma-separated mechanisms")
    parser.add_argument("--batch", default="32,128" if on_gpu else "2,8", help="comma-separated numbers of sentences")
    parser.add_argument("--tokens", type=int, default=30, help="tokens to generate per sentence")
    parser.add_argument("--source", type=int, default=30, help="tokens of the longest sentence")
    parser.add_argument("--repeats", type=int, default=measuring.REPEATS if on_gpu else 3)
    parser.add_argument("--dtype", default="bfloat16" if on_gpu else "float32", help="comma-separated types of ours")
    parser.add_argument("--ctranslate2", action="store_true", help="on a CPU, measure CTranslate2 too")
    parser.add_argument("--out", help="folder to write the numbers to, as JSON")
    parser.add_argument("--resume", action="store_true", help="measure only the rows that the file in --out lacks")
    given = parser.parse_args()
    given.attention, given.batch = given.attention.split(","), [int(n) for n in given.batch.split(",")]
    given.dtype = given.dtype.split(",")
    if given.ctranslate2 and on_gpu:
        parser.error("--ctranslate2 compares on a CPU; hide the GPU with CUDA_VISIBLE_DEVICES=")
    if not on_gpu:
        torch.set_num_threads(1)
    about = measuring.collect_provenance(SEED) | {"transformers": version("transformers")}
    keys = ["attention", "dtype", "batch", "sentences_per_s", "marian_sentences_per_s", "times_marian", "first_batch_s"]
    columns = ["attention", "type", "batch", "sentences/s", "Marian's", "× Marian", "first batch s"]
    if given.ctranslate2:
        about |= {"ctranslate2": version("ctranslate2")}
        keys += [f"times_ctranslate2_{kind}" for kind in ("float32", "int8")]
        columns += ["× CTranslate2 float32", "× CTranslate2 int8"]
    sheet = measuring.Sheet(given.out, "gpu" if on_gpu else "cpu", about, identify, given.resume)
    for row in measure_all(given, torch.device("cuda" if on_gpu else "cpu"), sheet):
        print(row, file=sys.stderr, flush=True)
        sheet.add(row)
    print(f"beam {BEAM}, {given.tokens} tokens, {given.size} on {about['hardware']}, torch {about['torch']}")
    print(measuring.format_table(columns, [[row.get(key, "–") for key in keys] for row in sheet.rows]))


if __name__ == "__main__":
    main()
