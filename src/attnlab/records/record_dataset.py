"""A folder of Records as a Hugging Face dataset: a row is what one attention layer did with one example.

record, example     file and index in it           query_words, key_words   tokens without padding, if recorded
kind, layer         as in Layer                    weights                  [heads][queries][keys]
mechanism, model    from the record's meta         norms                    [heads][queries] of the mixed context
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from attnlab.records.record import KINDS, Layer, Record


def open_dataset(folder: str | Path) -> Any:
    """Return a datasets.Dataset of all Records in a folder, *.safetensors. It lies on disk, in the cache of datasets.

    Raises ValueError if the folder has no Record, and ImportError without the package datasets.
    """
    try:
        import datasets
    except ImportError:
        raise ImportError("a dataset of records needs Hugging Face datasets: pip install 'attnlab[hub]'") from None
    paths = sorted(Path(folder).glob("*.safetensors"))
    if not paths:
        raise ValueError(f"{folder} has no records: save some there, record.save('{folder}/NAME.safetensors')")
    number, words = datasets.Value("float32"), datasets.List(datasets.Value("string"))
    texts = {name: datasets.Value("string") for name in ("record", "kind", "mechanism", "model")}
    counts = {name: datasets.Value("int32") for name in ("example", "layer")}
    tables = {"weights": _nest(datasets, number, 3), "norms": _nest(datasets, number, 2)}
    features = datasets.Features({**texts, **counts, "query_words": words, "key_words": words, **tables})
    stamps = [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in paths]
    return datasets.Dataset.from_generator(yield_rows, features=features, gen_kwargs={"files": stamps})


def yield_rows(files: list[tuple[str, int, int]]) -> Iterator[dict[str, Any]]:
    """Yield the rows of records, each a path with its time and size, by which datasets knows changed files."""
    for path, _, _ in files:
        record = Record.load(path)
        for layer in record.layers:
            for example in range(len(record)):
                yield describe_example(record, layer, example, Path(path).name)


def describe_example(record: Record, layer: Layer, example: int, name: str) -> dict[str, Any]:
    """Return the row of one layer and one example, without padding."""
    rows, keys = (_find_tokens(record, side, example) for side in KINDS[layer.kind])
    weights, mixed = layer.weights[example].float(), layer.mixed[example].float()
    if rows is not None:
        weights, mixed = weights[:, rows], mixed[:, rows]
    if keys is not None:
        weights = weights[:, :, keys]
    return {
        "record": name,
        "kind": layer.kind,
        "mechanism": str(record.meta.get("mechanism", "")),
        "model": str(record.meta.get("model", "")),
        "example": example,
        "layer": layer.index,
        "query_words": _list_words(record, KINDS[layer.kind][0], example, rows),
        "key_words": _list_words(record, KINDS[layer.kind][1], example, keys),
        "weights": weights.tolist(),
        "norms": mixed.norm(dim=-1).tolist(),
    }


def _find_tokens(record: Record, side: str, example: int) -> Tensor | None:
    """Return the positions of tokens that are no padding, or None without a mask."""
    return record.masks[side][example].bool().nonzero().flatten() if side in record.masks else None


def _list_words(record: Record, side: str, example: int, tokens: Tensor | None) -> list[str]:
    if side not in record.words:
        return []
    words = record.words[side][example]
    return words if tokens is None else [words[place] for place in tokens.tolist() if place < len(words)]


def _nest(datasets: Any, inner: Any, depth: int) -> Any:
    for _ in range(depth):
        inner = datasets.List(inner)
    return inner
