"""One inspection: a model and a text, a pair or a file; statistics over it all, and full maps of some examples."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from attnlab.commands.inspect.inspection_page import Shown, write
from attnlab.config import compute_digest
from attnlab.reading.reader import TextReader, open_reader
from attnlab.reading.survey import Progress, SurveyConfig, processes, survey
from attnlab.reading.text_stream import TextCorpus, TextExample

ROOT = Path("inspected")


@dataclass(frozen=True, kw_only=True)
class Request(SurveyConfig):
    """What is to be inspected, and how."""

    model: str
    text: str | None = None
    pair: tuple[str, str] | None = None
    file: str | None = None
    limit: int | None = None  # of a file, only the first so many examples
    examples: int = 0  # of a file, so many with full maps

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in ("text", "pair", "file") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of --text, --pair and --file, not {' and '.join(given) or 'none'}")
        if not all(side.strip() for side in (self.pair or (self.text if self.text is not None else "a",))):
            raise ValueError(f"--{given[0]} is empty: there is nothing to inspect")
        for name, least in (("limit", 1), ("examples", 0)):
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.file is None and (self.limit is not None or self.examples):
            raise ValueError("--limit and --examples go with --file")

    @property
    def corpus(self) -> TextCorpus:
        if self.file is not None:
            return TextCorpus(file=Path(self.file), limit=self.limit)
        if self.pair is not None:
            return TextCorpus((TextExample(self.pair[0], self.pair[1], "--pair"),))
        return TextCorpus((TextExample(self.text or "", None, "--text"),))

    @property
    def folder(self) -> Path:
        """Where it is written unless --out says where."""
        name = "".join(c if c.isalnum() or c in "-_." else "-" for c in Path(self.model).name or "model")
        return ROOT / f"{name}-{compute_digest(self)}"


def inspect(
    request: Request,
    *,
    out: Path | None = None,
    device: str = "auto",
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    command: str = "",
    made: Callable[[torch.device], Mapping[str, Any]] = lambda device: {},
    progress: Progress = lambda done, total, what: None,
    reader: TextReader | None = None,
) -> Path | None:
    """Inspect, and write what came out; where the page is, and None in all processes but the first.

    command, made   what the page says of how it came about: made tells versions and hardware of a device
    """
    folder, corpus = out or request.folder, request.corpus
    if folder.is_file():
        raise ValueError(f"--out {folder} is a file; what is written needs a folder")
    how: dict[str, Any] = {"device": device, "dtype": request.dtype, "max_length": request.max_length}
    reader = reader or open_reader(request.model, **how, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    config = SurveyConfig(**{name: getattr(request, name) for name in asdict(SurveyConfig())})
    statistics, contents = survey(reader, corpus, config, folder, progress=progress)
    if not processes(reader).is_main_process:
        return None
    wanted = 1 if request.file is None else request.examples
    shown = [
        Shown(number, reader.record([example]).to("cpu"), request.heads, request.layers)
        for number, example in enumerate(islice(corpus, wanted), start=1)
    ]
    about: dict[str, Any] = {"model": reader.name, "text": request.text, "pair": request.pair, "file": request.file}
    about |= {"examples": contents.examples, "tokens": contents.tokens, "corpus_sha256": contents.fingerprint}
    about |= asdict(config)
    return write(folder, about, statistics.tables(), shown, command, made(reader.device))
