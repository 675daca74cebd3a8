"""Data sets of the Hugging Face hub, or folders it can read: data=hf:NAME or data=hf:NAME:CONFIGURATION."""

from typing import Any

from attnlab.tasks.text import Labelled, Pairs

PREFIX = "hf:"
SPLITS = {"train": ("train",), "valid": ("validation", "valid", "dev"), "test": ("test",)}


def is_hub_name(data: str) -> bool:
    return data.startswith(PREFIX)


def load_splits(data: str) -> dict[str, Any]:
    """The splits of a set, by our names for them; train there must be."""
    try:
        import datasets
    except ImportError:
        raise ImportError(f"data={data} needs Hugging Face datasets: pip install datasets") from None
    path, _, configuration = data.removeprefix(PREFIX).partition(":")
    try:
        splits = datasets.load_dataset(path, configuration or None)
    except Exception as error:  # of many kinds, from the network to the set's own files
        raise ValueError(f"data={data}: {str(error).splitlines()[0]}") from None
    named = {part: next((splits[name] for name in names if name in splits), None) for part, names in SPLITS.items()}
    if named["train"] is None:
        raise ValueError(f"data={data}: has no split 'train'; it has {', '.join(splits)}")
    return {part: split for part, split in named.items() if split is not None}


def read_pairs(split: Any, languages: tuple[str, str], data: str) -> Pairs:
    """Sentence pairs: of a column `translation` that holds both languages, or of a column for each."""
    source, target = languages
    if "translation" in split.column_names:
        rows = list(split["translation"])
        if rows and not {source, target} <= set(rows[0]):
            raise ValueError(f"data={data}: has {', '.join(rows[0])}, not {source} and {target}; set pair=")
        return [row[source] for row in rows], [row[target] for row in rows]
    return _read_column(split, source, data), _read_column(split, target, data)


def read_text(split: Any, data: str) -> str:
    """The column `text`, a line each."""
    return "".join(f"{line}\n" for line in (text.removesuffix("\n") for text in _read_column(split, "text", data)))


def read_labelled(split: Any, text: str, label: str, data: str) -> Labelled:
    """Two columns; a label that has a name goes by it."""
    texts, labels = _read_column(split, text, data), _read_column(split, label, data)
    for number, value in enumerate(labels, start=1):
        if value in (None, "", -1):
            raise ValueError(f"data={data}: example {number:,} has no label (column {label!r})")
    names = getattr(split.features[label], "names", None)
    return texts, [names[value] if names else str(value) for value in labels]


def _read_column(split: Any, name: str, data: str) -> list[Any]:
    if name not in split.column_names:
        raise ValueError(f"data={data}: has no column {name!r}; there are {', '.join(split.column_names)}")
    return list(split[name])
