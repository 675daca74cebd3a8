"""The texts of the study: the beginnings of a training and a validation text, written into files of their own.

    OUT/work/text/NAME-CHARACTERS/train.txt, valid.txt

A named set has its own validation part; of one long text, a twentieth is held out at the end. An excerpt ends at the
end of a line where it can.
"""

from pathlib import Path

from attnlab.config import suggest_nearest
from attnlab.files import write_bytes
from attnlab.files.user_files import read_bytes
from attnlab.tasks.fetch import obtain_file
from attnlab.tasks.language import FILES, SHARED_FILES
from attnlab.tasks.sources import SETS

LABELS = {"wikitext-2": "WikiText-2", "enwik8": "enwik8"}  # in tables, by the value of data=
PARTS = ("train", "valid")
HELD_OUT = 20  # number of parts, of which the last is held out


def check_name(data: str) -> None:
    """Raise an error unless data= names a set of the study or a text file."""
    if data not in LABELS and not Path(data).is_file():
        if "/" in data or data.endswith(".txt"):
            raise FileNotFoundError(f"data={data}: no such file")
        near = suggest_nearest(data, LABELS)
        raise ValueError(f"data: unknown name {data!r}{near}; available: {', '.join(LABELS)}, or a text file")


def label_text(data: str) -> str:
    """Return the name of a text in tables and in the ledger: of a file, its name without its folder."""
    return LABELS.get(data) or Path(data).name


def write_excerpts(data: str, sizes: tuple[int, int], folder: Path, data_dir: str | None) -> None:
    """Write the first characters of the training and validation text, unless they are there.

    Raises OSError without data, and ValueError for a text that is too short, or that differs from an earlier one of
    its name.
    """
    for part, size in zip(PARTS, sizes, strict=True):
        file = folder / f"{part}.txt"
        if file.exists() and data in LABELS:
            continue
        excerpt = cut_text(_read_part(data, part, data_dir), size).encode("utf-8")
        if not excerpt.strip():
            raise ValueError(f"data={data} is too short to hold out a validation text: give a longer text")
        if file.exists() and file.read_bytes() != excerpt:
            raise ValueError(f"data={data} has changed since {file} was cut from it: choose another --out")
        write_bytes(file, excerpt)


def cut_text(text: str, size: int) -> str:
    """Return at most the first `size` characters of a text, up to the end of a line if there is one."""
    cut = text[:size]
    return cut if len(cut) == len(text) else cut[: cut.rfind("\n") + 1] or cut


def _read_part(data: str, part: str, data_dir: str | None) -> str:
    if data in FILES:
        return _decode(read_bytes(obtain_file(SETS[data], FILES[data].format(part), data_dir)))
    file = obtain_file(SETS[data], SHARED_FILES[data], data_dir) if data in SHARED_FILES else Path(data)
    whole = read_bytes(file)
    place = len(whole) - len(whole) // HELD_OUT
    return _decode(whole[:place] if part == "train" else whole[place:])


def _decode(content: bytes) -> str:
    """Decode UTF-8; a character that a cut halved is replaced."""
    return content.decode("utf-8", errors="replace").replace("\r\n", "\n")
