"""Inspect a model on a text, a pair or a file: statistics over all examples, and full maps of some."""

from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from attnlab.commands.inspect.inspection_findings import describe_text
from attnlab.commands.inspect.inspection_page import ShownTexts, write_report
from attnlab.commands.inspect.inspection_tables import explain_missing_layers, explain_missing_norms
from attnlab.commands.inspect.long_report import inspect_long_text
from attnlab.config import FREE_KEYS, Natural, compute_digest
from attnlab.files.user_files import read_text
from attnlab.provenance import collect_provenance
from attnlab.reading.long_text import LONG, count_tokens, explain_long_gap
from attnlab.reading.reader import PretrainedReader, TextReader, open_reader
from attnlab.reading.survey import Progress, SurveyConfig, find_processes, survey
from attnlab.reading.text_stream import TextCorpus, TextExample

ROOT = Path("inspected")
MOST_RANKED = 16  # first texts of a file that rank the heads: each head takes a pass


@dataclass(frozen=True, kw_only=True)
class InspectionRequest(SurveyConfig):
    """The model and the texts to inspect, with all settings."""

    model: str
    text: str | None = None
    pair: tuple[str, str] | None = None
    file: str | None = None
    limit: int | None = None  # maximum number of examples to read from the file
    examples: Natural = 0  # number of examples from the file to show with full maps
    document: str | None = None  # path of a file that is one text
    windows: tuple[Natural, ...] = ()  # tokens at which windows of a long text begin
    pan: bool = False  # whether windows of a long text follow one after another
    revision: str | None = None  # branch, tag or commit of a model on the hub
    gguf_file: str | None = None  # name of a GGUF file to load the model from
    importance: bool = False  # whether to rank the heads by knocking out each

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in ("text", "pair", "file", "document") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"pass one of --text, --pair, --file and --document, got {' and '.join(given) or 'none'}")
        if not all(side.strip() for side in (self.pair or (self.text if self.text is not None else "a",))):
            raise ValueError(f"--{given[0]} is empty: pass some text")
        if self.windows and self.pan:
            raise ValueError("--window chooses windows and --pan takes all: pass one of them")
        if self.file is None and (self.limit is not None or self.examples):
            raise ValueError("--limit and --examples need --file")

    @property
    def corpus(self) -> TextCorpus:
        if self.file is not None:
            return TextCorpus(file=Path(self.file), limit=self.limit)
        if self.pair is not None:
            return TextCorpus((TextExample(self.pair[0], self.pair[1], "--pair"),))
        if self.document is not None:
            whole = read_text(Path(self.document)).strip()
            if not whole:
                raise ValueError(f"{self.document} is empty: pass a file with some text")
            return TextCorpus((TextExample(whole, None, self.document),))
        return TextCorpus((TextExample(self.text or "", None, "--text"),))

    @property
    def folder(self) -> Path:
        """The default output folder."""
        name = "".join(c if c.isalnum() or c in "-_." else "-" for c in Path(self.model).name or "model")
        later = ("analyses", "document", "windows", "pan", "revision", "gguf_file", "importance")
        without = (*FREE_KEYS, *(key for key in later if not getattr(self, key)))  # unset, they do not change the name
        return ROOT / f"{name}-{compute_digest(self, without=without)}"


def inspect(
    request: InspectionRequest, out: Path | None, *, device: str, command: str, progress: Progress, **how: bool
) -> Path | None:
    """Inspect a model, write the report and return its path; None in all processes but the first.

    out       the folder to write to; None for the default
    command   the command line, which the report shows
    how       allow_code; for Hugging Face models also allow_pickle and trust_remote_code
    """
    folder, corpus = out or request.folder, request.corpus
    if folder.is_file():
        raise ValueError(f"--out {folder} is a file: pass a folder")
    reader = open_reader(
        request.model, device=device, dtype=request.dtype, max_length=request.max_length, revision=request.revision,
        gguf_file=request.gguf_file, **how,
    )  # fmt: skip
    translation, option = None, "--pan" if request.pan else "--window"
    if request.text is not None or request.document is not None:
        corpus = TextCorpus(tuple(reader.complete(example) for example in corpus))
        translation = corpus.given[0].second
    if request.file is None and count_tokens(reader, corpus.given[0]) > LONG:
        gap = explain_long_gap(reader, corpus.given[0])
        if gap is None and isinstance(reader, PretrainedReader):
            return inspect_long_text(reader, corpus.given[0], request, folder, command, progress)
        if request.windows or request.pan:
            raise ValueError(f"{option}: {request.model} shows no windows, because {gap}")
    elif request.windows or request.pan:
        raise ValueError(f"{option} is for a text of more than {LONG:,} tokens; this one is shown whole")
    config = SurveyConfig(**{name: getattr(request, name) for name in asdict(SurveyConfig())})
    statistics, contents = survey(reader, corpus, config, folder, progress=progress)
    if not find_processes(reader).is_main_process:
        return None
    shown = _read_shown(reader, corpus, 1 if request.file is None else request.examples, translation)
    if request.file is None and (sentence := describe_text(shown.predictions[0], translation)):
        print(sentence)
    tables = statistics.tables()
    if request.importance:
        places: dict[str, Any] = {"layers": request.layers, "heads": request.heads}
        tables["importance"] = reader.rank_heads(list(islice(corpus, MOST_RANKED)), progress=progress, **places)
    for missing in (shown.left_out, explain_missing_norms(tables["heads"])):
        if missing:
            print(missing)
    about: dict[str, Any] = {"model": reader.name, "text": request.text, "pair": request.pair, "file": request.file}
    about |= {"examples": contents.examples, "tokens": contents.tokens, "corpus_sha256": contents.fingerprint}
    about |= asdict(config) | {"translation": translation}
    if request.importance:
        about["ranked_texts"] = min(MOST_RANKED, contents.examples)
    return write_report(folder, about, tables, shown, command, collect_provenance(reader.device))


def _read_shown(reader: TextReader, corpus: TextCorpus, count: int, translation: str | None) -> ShownTexts:
    """Record and predict the first texts, and say which layers of the model cannot be recorded."""
    texts = list(islice(corpus, count))
    records = [reader.record([example]).to("cpu") for example in texts]
    one = records[0] if records else reader.record(list(islice(corpus, 1)))
    left_out = explain_missing_layers(one.meta.get("unrecorded", ""))
    return ShownTexts(reader.title, records, [reader.predict(example) for example in texts], translation, left_out)
