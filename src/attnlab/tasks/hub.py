"""Data sets from the Hugging Face hub or from a folder that `datasets` can read: data=hf:NAME[:CONFIGURATION]."""

from typing import Any

from attnlab.tasks.text import Labelled, Pairs

PREFIX = "hf:"
SPLITS = {"train": ("train",), "valid": ("validation", "valid", "dev"), "test": ("test",)}


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
