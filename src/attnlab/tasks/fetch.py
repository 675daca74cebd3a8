"""Find or fetch the files of a named set: in a folder of the user, in the cache, or at its official source.

A download resumes from its .part file, is checked by its checksum, and is moved into place in one step. With a wrong
checksum, nothing is kept. Files are requested one by one, so only the files in use are fetched.
"""

import hashlib
import os
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import cache
from http.client import HTTPException
from pathlib import Path

from filelock import FileLock
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from attnlab.config import suggest_nearest
from attnlab.files.user_files import CHUNK
from attnlab.tasks.sources import SETS, Download, NamedSet
from attnlab.tasks.unpack import read_members

ATTEMPTS = 3  # for each address, each resuming the last one
TIMEOUT_S = 60
MOST_BYTES = 4 * 2**30  # of one download


def obtain_file(dataset: NamedSet, name: str, data_dir: str | None = None) -> Path:
    """Return the path of one file of a set, stored as name or name.gz; fetch it if it is missing.

    Raises FileNotFoundError if the file cannot be fetched.
    """
    if path := find_file(dataset, name, data_dir):
        return path
    if data_dir:
        path = Path(data_dir) / dataset.folder / name
        raise FileNotFoundError(f"{path}[.gz] does not exist. {dataset.describe_steps()}")
    download = next((d for d in dataset.downloads if name in d.files), None)
    if download is None or not (download.checksum or name in dataset.contents):
        raise FileNotFoundError(f"{dataset.name}: {name} is missing. {dataset.describe_steps()}")
    folder = get_cache_folder() / dataset.folder
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if not (folder / name).exists():  # another process may have fetched it
            _print_licence(dataset.name, dataset.licence, dataset.home)
            fetch_files(download, dataset, folder)
    return folder / name


def find_file(dataset: NamedSet, name: str, data_dir: str | None) -> Path | None:
    """Find a file of a set in data_dir, if given, or else in ATTNLAB_DATA and the cache."""
    root = os.environ.get("ATTNLAB_DATA")
    for key, value in (("ATTNLAB_DATA", root), ("data_dir", data_dir)):
        if value and not Path(value).is_dir():
            raise FileNotFoundError(f"{key}={value}: no such folder")
    for folder in [Path(data_dir)] if data_dir else [*([Path(root)] if root else []), get_cache_folder()]:
        for path in (folder / dataset.folder / name, folder / dataset.folder / f"{name}.gz"):
            if path.exists():
                return path
    return None


def get_cache_folder() -> Path:
    """Return the folder of fetched sets."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attnlab" / "data"


def fetch_files(download: Download, dataset: NamedSet, folder: Path) -> None:
    """Download and unpack, check the checksums, and move the files into the folder; keep nothing on an error."""
    errors = []
    for url in download.urls:
        archive = folder / f".download-{url.rpartition('/')[2]}"
        try:
            download_file(url, archive, download.checksum)
            try:
                _unpack_archive(archive, download, dataset, folder)
            finally:
                archive.unlink(missing_ok=True)
            return
        except (OSError, HTTPException, ValueError) as error:
            errors.append(f"{url}: {error}")
    raise OSError(f"cannot fetch {dataset.name}:\n  " + "\n  ".join(errors) + f"\n{dataset.describe_steps()}")


def download_file(url: str, path: Path, checksum: str | None) -> None:
    """Download an address to a file, resuming earlier attempts; keep it only if the checksum is right."""
    if not url.startswith(("http://", "https://")):
        raise ValueError("the address must begin with http:// or https://")
    part = path.with_name(f"{path.name}.part")
    for attempt in range(1, ATTEMPTS + 1):
        try:
            resumed = _receive_bytes(url, part)
        except ValueError:  # too large
            part.unlink(missing_ok=True)
            raise
        except (OSError, HTTPException) as error:
            if attempt == ATTEMPTS or isinstance(error, urllib.error.HTTPError):
                raise
            continue
        if checksum is None or compute_checksum(part, checksum.partition(":")[0]) == checksum.partition(":")[2]:
            part.replace(path)
            return
        part.unlink()
        if not resumed:  # if resumed, the old part may be wrong: try again from the start
            break
    raise ValueError("wrong checksum; nothing was kept")


def _receive_bytes(url: str, part: Path) -> bool:
    """Append the missing bytes to a .part file; return whether it resumed an earlier download."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "attnlab"} | ({"Range": f"bytes={have}-"} if have else {})
    request = urllib.request.Request(url, headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # no bytes beyond these: complete, or a part of another file
            return True
        raise
    with response:
        starts = response.headers.get("Content-Range", "")
        resumed = response.status == 206 and starts.startswith(f"bytes {have}-")
        if have and not resumed and response.status == 206:
            raise OSError(f"asked for bytes from {have}, got {starts!r}")
        length = response.headers.get("Content-Length")
        total = int(length) + (have if resumed else 0) if length else None
        if total is not None and total > MOST_BYTES:
            raise ValueError(f"the download has {total:,} bytes, more than {MOST_BYTES:,}")
        with part.open("ab" if resumed else "wb") as file, _make_progress(url, total) as progress:
            task = progress.add_task("", total=total, completed=have if resumed else 0)
            while piece := response.read(CHUNK):
                if file.tell() + len(piece) > MOST_BYTES:
                    raise ValueError(f"the download has more than {MOST_BYTES:,} bytes")
                file.write(piece)
                progress.update(task, advance=len(piece))
            received = file.tell()
    if total is not None and received != total:
        raise OSError(f"the connection ended after {received:,} of {total:,} bytes; run the command again to resume")
    return resumed


def _unpack_archive(archive: Path, download: Download, dataset: NamedSet, folder: Path) -> None:
    """Unpack the files of a download into a temporary folder, check each, then move all of them into place."""
    staged = folder / ".unpacked"
    shutil.rmtree(staged, ignore_errors=True)  # from a killed process: this one holds the lock
    staged.mkdir()
    try:
        for name, pieces in _read_files(archive, download):
            path = staged / name
            with path.open("wb") as file:
                for piece in pieces:
                    file.write(piece)
            if (expected := dataset.contents.get(name)) and compute_checksum(path, "sha256") != expected:
                raise ValueError(f"{name}: wrong checksum after unpacking; nothing was kept")
        if missing := set(download.files) - {path.name for path in staged.iterdir()}:
            raise ValueError(f"the archive lacks {', '.join(sorted(missing))}; nothing was kept")
        for path in staged.iterdir():
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _read_files(archive: Path, download: Download) -> Iterator[tuple[str, Iterator[bytes]]]:
    if download.convert is not None:
        yield from ((name, iter([data])) for name, data in download.convert(archive))
    elif (only := next(iter(download.files.items())))[1] is None:
        yield from ((only[0], pieces) for _, pieces in read_members(archive, lambda _: True))
    else:
        names = {member: name for name, member in download.files.items()}
        yield from ((names[member], pieces) for member, pieces in read_members(archive, names.__contains__))


def compute_checksum(path: Path, kind: str) -> str:
    """Return the checksum of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()


def _make_progress(url: str, total: int | None) -> Progress:
    name = url.rpartition("/")[2]
    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(*columns, transient=True, disable=not sys.stderr.isatty())


@cache
def _print_licence(name: str, licence: str, home: str) -> None:
    """Print the licence of a set once, however many files are fetched."""
    print(f"{name}: licence: {licence} ({home})", file=sys.stderr)


def find_set(name: str, task: str) -> NamedSet:
    """Find a named set of a task. Raises ValueError for an unknown name."""
    sets = {key: value for key, value in SETS.items() if value.task == task}
    if name not in sets:
        hint, files = suggest_nearest(name, sets), ALTERNATIVES[task]
        raise ValueError(f"data={name}: no such set{hint}; available: {', '.join(sets)}, or give {files}")
    return sets[name]


ALTERNATIVES = {
    "translation": "src= and tgt=, or a .tsv or .tmx file",
    "language": "an existing text file",
    "classification": "a .csv, .tsv or .jsonl file",
}
