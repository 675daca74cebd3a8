"""Which architectures attnlab records and adapts, by tiny random models of sixty of them, with the largest error.

    python benchmarks/architectures.py [--out results/architectures] [--only BERT "Gemma 2"] [--draw]

    record    weights beside those of the model's own eager attention, which transformers alone computes
    norms     Σ_j α_ij f(x_j) + b beside what the output projection returned, and ‖α_ij f(x_j)‖ by the definition
    adapt     the output with `softmax` put in its place beside the eager model's; `dagpam` then has finite gradients
    decode    the adapted model with its cache, one token at a time, beside the model itself; – if it keeps no cache

Errors are relative to 1 + the largest number, in float32. An error above 1e-4 is printed as WRONG. A refusal is printed
with its reason.
The table in docs/hugging-face.md is drawn from results/architectures/cpu.json; --draw draws it without measuring.
"""

import argparse
import copy
import json
import time
import warnings
from pathlib import Path
from typing import Any

import measuring
import torch
import transformers
from architecture_models import ARCHITECTURES, build_batch, build_model
from torch import Tensor, nn

import attnlab
from attnlab.analysis.contribution import norms

ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "results" / "architectures", ROOT / "docs" / "hugging-face.md"
BEGIN, END = "<!-- architectures: drawn by benchmarks/architectures.py -->", "<!-- end of architectures -->"
PARTS = ("record", "norms", "adapt", "decode")
ALLOWED, SEED = 1e-4, 7


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="Folder of the results.")
    parser.add_argument("--only", nargs="*", help="Names of the architectures to try; nothing is written then.")
    parser.add_argument("--draw", action="store_true", help="Draw the table in the docs from the results, and stop.")
    arguments = parser.parse_args()
    if arguments.draw:
        draw_table()
        return
    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    rows = [measure(name) for name in arguments.only or ARCHITECTURES]
    for row in rows:
        print(f"{row['architecture']:18s} " + "  ".join(f"{part} {show(row[part]):9s}" for part in PARTS))
        for reason in row["reasons"]:
            print(f"{'':18s} {reason}")
    totals = count(rows)
    print(", ".join(f"{part} {done} of {len(rows)}" for part, done in totals.items()))
    if not arguments.only:
        about = measuring.collect_provenance(SEED) | {"transformers": transformers.__version__, "totals": totals}
        arguments.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"about": about, "rows": rows}, indent=1) + "\n"
        (arguments.out / "cpu.json").write_text(text, encoding="utf-8")
        if arguments.out == RESULTS:
            draw_table()


def draw_table() -> None:
    """Write the table of the results into the docs, between its marks."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{render_table()}\n{END}{after}", encoding="utf-8")


def render_table() -> str:
    """Return the results as Markdown."""
    content = json.loads((RESULTS / "cpu.json").read_text(encoding="utf-8"))
    about, rows = content["about"], content["rows"]
    totals = ", ".join(f"{part} {done}" for part, done in about["totals"].items())
    lines = [
        f"Of {len(rows)} architectures: {totals}. transformers {about['transformers']}, torch {about['torch']}, commit "
        f"{about['commit']}.",
        "",
        "| architecture | class | record | norms | adapt | decode | |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        cells = [row["architecture"], f"`{row['class']}`", *(show(row[part]) for part in PARTS), explain(row)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def explain(row: dict[str, Any]) -> str:
    """Return what a reader of the table should know about a row: the first reason of a refusal, or a note."""
    if row["reasons"]:
        return row["reasons"][0]
    return f"not recorded: {row['note']}" if row["note"] else ""


def show(value: Any) -> str:
    """Return an error as a text; a refusal and a part that does not apply as words."""
    if not isinstance(value, float):
        return value
    return f"{value:.0e}" if value <= ALLOWED else f"WRONG {value:.0e}"


def count(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Return the number of architectures that each part works for."""
    return {part: sum(isinstance(row[part], float) and row[part] <= ALLOWED for row in rows) for part in PARTS}


def measure(name: str) -> dict[str, Any]:
    """Return the errors of one architecture, "refused" or "–", and the reasons of refusals."""
    kind = ARCHITECTURES[name][0]
    row: dict[str, Any] = {"architecture": name, "class": kind, "reasons": [], "note": ""}
    row |= dict.fromkeys(PARTS, "refused")
    started = time.perf_counter()
    for work in (measure_record, measure_adapted):
        model = build_model(name)
        try:
            found = work(model, build_batch(model))
        except ValueError as error:
            reason = str(error).replace("\n", " ")
            row["reasons"] += [] if reason in row["reasons"] else [reason]
        else:
            row |= found
    row["seconds"] = round(time.perf_counter() - started, 2)
    return row


def measure_record(model: Any, batch: dict[str, Tensor]) -> dict[str, Any]:
    """Return the errors of weights and of contributions, and what the record says about its layers."""
    own = collect_weights(copy_eager(model), batch)
    record = attnlab.record(model, batch)
    differences, sums = [], []
    seen: dict[str, int] = {}
    for layer in record.layers:
        turn = seen[layer.name] = seen.get(layer.name, -1) + 1
        theirs = own[layer.name][turn] if layer.name in own else None
        if theirs is not None:
            mask = record.masks.get("target" if layer.kind != "encoder-self" else "source")
            ours = layer.weights
            if mask is not None and mask.shape == (ours.shape[0], ours.shape[2]):
                ours, theirs = (x.transpose(1, 2)[mask] for x in (ours, theirs))
            differences.append(compare(ours, theirs))
        sums.append(measure_contributions(layer))
    note = record.meta.get("unrecorded", "")
    return {
        "record": max(differences, default=max(sums)),
        "norms": max(sums),
        "note": note,
        "layers": len(record.layers),
    }


def measure_contributions(layer: Any) -> float:
    """Return the error of Σ_j α f(x_j) + b, and of the norms, by the definition."""
    values, weights = layer.values.double(), layer.weights.double()
    turned = values[:, :, None].expand(-1, -1, weights.shape[2], -1, -1)  # (b,h,i,j,d)
    if layer.turning is not None:
        turned = turned * layer.turning.double().unsqueeze(3)
    parts = torch.einsum("bhij,bhijd,hde->bhije", weights, turned, layer.output_weight.double())
    total = parts.sum((1, 3))
    total = total if layer.output_bias is None else total + layer.output_bias.double()
    return max(compare(total, layer.outputs), compare(norms(layer).head, parts.norm(dim=-1)))


def compare(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, relative to 1 + the largest number."""
    return (ours - theirs).abs().max().item() / (1 + theirs.abs().max().item())


def copy_eager(model: Any) -> Any:
    """Return a copy with eager attention: torch's fused attention leaves out the cap of Gemma 2."""
    model = copy.deepcopy(model)
    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel):
            part.config._attn_implementation = "eager"
    return model


def collect_weights(model: Any, batch: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """Return the weights that attention modules return in an eager pass of transformers, by name of the module."""
    found: dict[str, list[Tensor]] = {}

    def watch(name: str, module: nn.Module) -> None:
        def note(_module: nn.Module, _args: Any, output: Any) -> None:
            for x in reversed(output if isinstance(output, tuple | list) else ()):
                if isinstance(x, Tensor) and x.dim() == 4 and x is not output[0]:
                    found.setdefault(name, []).append(subtract_halves(module, x))
                    return

        module.register_forward_hook(note)

    for name, module in model.named_modules():
        if type(module).__name__ != "MiniMaxLightningAttention":  # it returns a state, not weights
            watch(name, module)
    with torch.no_grad():
        model(**batch, output_attentions=True)
    return found


def subtract_halves(module: Any, weights: Tensor) -> Tensor:
    """Return the weights of DiffLlama's difference, and all others as they are."""
    if type(module).__name__ != "DiffLlamaAttention":
        return weights
    first, second = (
        torch.exp(module.get_parameter(f"lambda_q{n}") @ module.get_parameter(f"lambda_k{n}")) for n in (1, 2)
    )
    half = weights.shape[1] // 2
    return weights[:, :half] - (first - second + module.lambda_init) * weights[:, half:]


def measure_adapted(model: Any, batch: dict[str, Tensor]) -> dict[str, Any]:
    """Return the errors of an adapted model's output and of decoding with its cache."""
    other = attnlab.adapt(copy.deepcopy(model), "dagpam")
    read_output(other, batch).square().sum().backward()
    gradients = [p.grad for p in other.parameters() if p.grad is not None]
    if not all(torch.isfinite(gradient).all() for gradient in gradients):
        raise ValueError("gradients of dagpam are not finite")
    with torch.no_grad():
        eager = copy_eager(model)
        own, steps = read_output(eager, batch), decode(eager, batch)
        attnlab.adapt(model, "softmax")
        decoded = "–" if steps is None else compare(decode(model, batch), steps)
        return {"adapt": compare(read_output(model, batch), own), "decode": decoded}


def read_output(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the first output at tokens, not at padding."""
    output = model(**batch)[0]
    mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
    return output[mask.bool()] if mask is not None and mask.shape == output.shape[:2] else output


def decode(model: Any, batch: dict[str, Tensor]) -> Tensor | None:
    """Return the logits of the first example with a cache, token by token; None if the model keeps none."""
    if not model.can_generate():
        return None
    given = {name: x[:1] for name, x in batch.items() if not name.startswith("decoder")}
    tokens = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    rest = given if model.config.is_encoder_decoder else {}
    cache, steps = None, []
    for token in batch[tokens][:1].unbind(1):
        output = model(**rest, **{tokens: token[:, None]}, past_key_values=cache, use_cache=True)
        cache = output.get("past_key_values")
        if cache is None:  # as the first GPT
            return None
        steps.append(output.logits)
    return torch.cat(steps, 1)


if __name__ == "__main__":
    main()
