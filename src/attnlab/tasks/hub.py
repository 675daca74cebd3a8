"""The Hugging Face hub: whether it answers, and its data sets (or those of a folder): data=hf:NAME[:CONFIGURATION]."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

from attnlab.tasks.text import Labelled, Pairs

PREFIX = "hf:"
SPLITS = {"train": ("train",), "valid": ("validation", "valid", "dev"), "test": ("test",)}


LIMIT_S = 3.0  # how long the hub may take to answer
REMEMBERED_S = 60.0  # how long its answer counts

_answers: dict[str, tuple[float, bool]] = {}  # by address: when it was asked, and whether it answered


@contextmanager
def reach_hub(name: str) -> Iterator[None]:
    """Read a model or a tokenizer from the hub; or only from the local cache, if the hub does not answer in time.

    Without this, huggingface_hub tries again for minutes. A folder needs no hub.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    if not before and not Path(name).expanduser().exists():
        constants.HF_HUB_OFFLINE = not is_hub_reachable()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def is_hub_reachable() -> bool:
    """Return whether the hub answers within LIMIT_S. It is asked once; its answer counts for REMEMBERED_S."""
    from huggingface_hub import constants

    asked, answer = _answers.get(constants.ENDPOINT, (-REMEMBERED_S, False))
    if time.monotonic() - asked < REMEMBERED_S:
        return answer
    replies: list[object] = []
    thread = Thread(target=_ask_hub, args=(constants.ENDPOINT, replies), daemon=True)  # a name server may take longer
    thread.start()
    thread.join(LIMIT_S)
    _answers[constants.ENDPOINT] = (time.monotonic(), bool(replies))
    return bool(replies)


def _ask_hub(address: str, replies: list[object]) -> None:
    from huggingface_hub import get_session

    try:
        replies.append(get_session().head(address, timeout=LIMIT_S))
    except Exception:  # of many types: no network, no name server, a proxy that refuses
        return


def is_path(name: str) -> bool:
    """Return whether a name can only be a path: the ids of the hub are NAME or OWNER/NAME."""
    return name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1


def is_hub_name(data: str) -> bool:
    return data.startswith(PREFIX)


def load_splits(data: str) -> dict[str, Any]:
    """Load the splits of a set by part: "train", and "valid" and "test" if the set has them."""
    try:
        import datasets
    except ImportError:
        raise ImportError(f"data={data} needs Hugging Face datasets: pip install datasets") from None
    path, _, configuration = data.removeprefix(PREFIX).partition(":")
    try:
        with reach_hub(path):
            splits = datasets.load_dataset(path, configuration or None)
    except Exception as error:  # of many types, from the network to the files of the set
        raise ValueError(f"data={data}: {str(error).splitlines()[0]}") from None
    parts = {part: next((splits[name] for name in names if name in splits), None) for part, names in SPLITS.items()}
    if parts["train"] is None:
        raise ValueError(f"data={data} has no split 'train'; available: {', '.join(splits)}")
    return {part: split for part, split in parts.items() if split is not None}


def read_pairs(split: Any, languages: tuple[str, str], data: str) -> Pairs:
    """Read sentence pairs from a column `translation` with both languages, or from one column for each language."""
    source, target = languages
    if "translation" in split.column_names:
        rows = list(split["translation"])
        if rows and not {source, target} <= set(rows[0]):
            raise ValueError(f"data={data} has {', '.join(rows[0])}, not {source} and {target}; set pair=")
        return [row[source] for row in rows], [row[target] for row in rows]
    return _read_column(split, source, data), _read_column(split, target, data)


def read_text(split: Any, data: str) -> str:
    """Read the column `text`, one line per row."""
    return "".join(f"{line}\n" for line in (text.removesuffix("\n") for text in _read_column(split, "text", data)))


def read_labelled(split: Any, text: str, label: str, data: str) -> Labelled:
    """Read a text and a label column. Class labels are replaced by their names."""
    texts, labels = _read_column(split, text, data), _read_column(split, label, data)
    for number, value in enumerate(labels, start=1):
        if value in (None, "", -1):
            raise ValueError(f"data={data}: example {number:,} has no label (column {label!r})")
    names = getattr(split.features[label], "names", None)
    return texts, [names[value] if names else str(value) for value in labels]


def _read_column(split: Any, name: str, data: str) -> list[Any]:
    if name not in split.column_names:
        raise ValueError(f"data={data} has no column {name!r}; available: {', '.join(split.column_names)}")
    return list(split[name])
