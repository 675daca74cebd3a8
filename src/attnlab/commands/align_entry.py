"""The commands `attnlab align` and `attnlab align-train`."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from attnlab.commands.arguments import Aligner, AllowCode, Device, Files, Teacher

ALIGN_BY = "weight, norm, signed, probe, gradient, encoder, or auto; default: auto with --reverse, else norm."
ALIGN_LAYER = "Number from 0, mean, highest-norm (default), lowest-entropy, agreement or best-on:GOLD."
ALIGN_DECIDE = "grow (default), mutual, argmax, grow-diag-final-and, threshold, itermax or transport."


def align(
    model: Aligner,
    source: Annotated[Path, Argument(metavar="SRC", help="Text, one sentence per line.")],
    target: Annotated[Path, Argument(metavar="TGT", help="Translation of SRC, line by line.")],
    by: Annotated[str | None, Option(help=ALIGN_BY)] = None,
    setting: Annotated[str | None, Option(help="awo, awi or auto (default): the one that fits the text.")] = None,
    layer: Annotated[str | None, Option(help=ALIGN_LAYER)] = None,
    head: Annotated[str | None, Option(help="As --layer; default: mean, all heads together.")] = None,
    best_on_text: Annotated[Files, Option(metavar="SRC TGT", help="Text of best-on's links; default: SRC TGT.")] = None,
    reverse: Annotated[str | None, Option(metavar="MODEL", help="Model that also aligns TGT to SRC.")] = None,
    symmetrise: Annotated[str | None, Option(help="Join links: intersection, union or grow-diag-final-and.")] = None,
    combine: Annotated[str, Option(help="Join the soft maps of both directions: mean or geometric.")] = "mean",
    decide: Annotated[str | None, Option(help=ALIGN_DECIDE)] = None,
    null: Annotated[float | None, Option(help="Leave out links with a lower value in the soft map.")] = None,
    grow: Annotated[float | None, Option(help="Smallest value of links that --decide grow adds.")] = None,
    threshold: Annotated[float | None, Option(help="Smallest value of links of --decide threshold.")] = None,
    pieces: Annotated[str, Option(help="Value of a word from its pieces: mean or max.")] = "mean",
    precision: Annotated[str, Option(help="float32, bfloat16, int8 (CPU); auto: bfloat16 on a GPU.")] = "auto",
    languages: Annotated[str | None, Option(help="Codes of NLLB, M2M100 or mBART, as eng_Latn-fra_Latn.")] = None,
    prefix: Annotated[str, Option(help="Text before each source line, for T5.")] = "",
    reverse_prefix: Annotated[str, Option(help="The same for --reverse.")] = "",
    tokenize: Annotated[str, Option(help="none (split at white space), or moses, which needs --pair.")] = "none",
    pair: Annotated[str | None, Option(help="Language pair, for example de-en.")] = None,
    train_on: Annotated[Files, Option(metavar="SRC TGT", help="Text to train on; default: SRC TGT.")] = None,
    diagonal: Annotated[bool, Option("--diagonal", help="Use the model of fast_align for ibm1, with a prior.")] = False,
    gold: Annotated[str | None, Option(metavar="FILE", help="Gold links to score against.")] = None,
    gold_format: Annotated[str | None, Option(help="pharaoh, talp or naacl; default: by the file name.")] = None,
    gold_base: Annotated[int | None, Option(help="Number of the first word in the gold file: 0 or 1.")] = None,
    bootstrap: Annotated[int, Option(help="Number of bootstrap samples for the intervals.")] = 1000,
    scores: Annotated[bool, Option("--scores", help="Write each link with its score, as 0-0:0.93.")] = False,
    project: Annotated[str | None, Option(metavar="FILE", help="Carry tags or spans of SRC over to TGT.")] = None,
    terms: Annotated[str | None, Option(metavar="FILE", help="Write a bilingual list of terms, as TSV.")] = None,
    show: Annotated[str | None, Option(metavar="FILE", help="Write a page that draws the links.")] = None,
    export: Annotated[str | None, Option(help="ctranslate2 (alignment heads) or guided (links of pieces).")] = None,
    export_to: Annotated[str | None, Option(help="Folder of the converted model of --export ctranslate2.")] = None,
    guided_text: Annotated[Files, Option(metavar="SRC TGT", help="Subword files of --export guided.")] = None,
    out: Annotated[Path | None, Option(help="File to write the links to; default: standard output.")] = None,
    device: Device = "auto",
    allow_code: AllowCode = False,
) -> None:
    """Align words. Writes Pharaoh lines, numbered from 0: one per sentence pair, empty if nothing is linked."""
    given = dict(locals())
    from attnlab.commands.align import AlignOptions, align_files

    model, source, target, out = (given.pop(name) for name in ("model", "source", "target", "out"))
    given["train_files"] = given.pop("train_on")
    align_files(model, source, target, AlignOptions(**given), out)


def align_train(
    model: Teacher,
    source: Annotated[Path, Argument(metavar="SRC", help="Text, one sentence per line.")],
    target: Annotated[Path, Argument(metavar="TGT", help="Translation of SRC, line by line.")],
    out: Annotated[str, Option(help="Name of the aligner in runs/, or a path.")],
    reverse: Annotated[str | None, Option(metavar="MODEL", help="Translator from TGT to SRC.")] = None,
    pairs: Annotated[int, Option(help="Number of pairs to draw from the files.")] = 20_000,
    by: Annotated[str | None, Option(help="What the teacher reads, as in attnlab align.")] = None,
    layer: Annotated[str | None, Option(help="Layer of the teacher, as in attnlab align.")] = None,
    precision: Annotated[str, Option(help="float32, bfloat16, int8 (CPU); auto: bfloat16 on a GPU.")] = "auto",
    languages: Annotated[str | None, Option(help="Codes of NLLB, M2M100 or mBART, as eng_Latn-fra_Latn.")] = None,
    width: Annotated[int, Option(help="Width of the trained projections.")] = 256,
    learning_rate: Annotated[float, Option(help="Peak learning rate.")] = 1e-3,
    seed: Annotated[int, Option(help="Seed of the sample, the initialization and the order.")] = 0,
    device: Device = "auto",
    allow_code: AllowCode = False,
) -> None:
    """Train an aligner on parallel text without gold links: its target is the agreement of both directions."""
    from attnlab.commands.align_train import AlignerConfig, AlignTrainOptions, train_on_files

    config = AlignerConfig(width=width, learning_rate=learning_rate, seed=seed)
    given: dict[str, Any] = {
        "reverse": reverse, "pairs": pairs, "by": by, "layer": layer, "precision": precision, "languages": languages,
        "device": device, "allow_code": allow_code, "config": config,
    }  # fmt: skip
    train_on_files(model, source, target, AlignTrainOptions(**given), out)
