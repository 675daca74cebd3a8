"""Learned vocabularies, kept in the user's cache: the same texts and settings are learned once.

A file is named by the SHA-256 of the texts and settings. It begins with the SHA-256 of what follows, so a damaged file
is recognized and learned again. Short texts are not kept: learning takes a moment. A cache that cannot be read or
written changes nothing but the time.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from attnlab.files import write_bytes
from attnlab.tasks.fetch import get_cache_folder

LEAST_TEXT = 500_000  # characters of the shortest texts whose vocabulary is kept
_listeners: list[Callable[[], None]] = []  # called when a long text's vocabulary is about to be learned


def recall_or_learn(lines: Sequence[str], settings: Mapping[str, Any], learn: Callable[[], bytes]) -> bytes:
    """Return what `learn` returns for these lines and settings, from the cache if it is there."""
    if sum(map(len, lines)) < LEAST_TEXT:
        return learn()
    name = f"{_digest(lines, settings)}.vocabulary"
    with suppress(OSError, RuntimeError):  # RuntimeError: the user has no home
        if (known := _read_pieces(_find_folder() / name)) is not None:
            return known
    for listener in _listeners:
        listener()
    learned = learn()
    with suppress(OSError, RuntimeError):
        write_bytes(_find_folder() / name, hashlib.sha256(learned).digest() + learned)
    return learned


@contextmanager
def announce_learning(listener: Callable[[], None]) -> Iterator[None]:
    """Call a function before each vocabulary that the block learns from a long text, which takes seconds."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def _find_folder() -> Path:
    return get_cache_folder().parent / "vocabularies"


def _read_pieces(path: Path) -> bytes | None:
    """Return the contents of a file of the cache, or None if it is damaged."""
    data = path.read_bytes()
    digest, learned = data[:32], data[32:]
    return learned if hashlib.sha256(learned).digest() == digest else None


def _digest(lines: Sequence[str], settings: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(repr(sorted(settings.items())).encode())
    for line in lines:
        data = line.encode(errors="surrogatepass")
        digest.update(b"%d:%b" % (len(data), data))
    return digest.hexdigest()
