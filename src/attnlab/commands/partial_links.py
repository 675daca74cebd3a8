"""Links of a long text, written in chunks: an interrupted command continues after the last whole line.

OUT.partial        the lines so far        OUT.partial.json   the command, and what it chose to read
"""

import json
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from attnlab.files import explain_errors, write_text
from attnlab.files.user_files import parse_json


class PartialLinks:
    """The output of one command: standard output if there is no file."""

    def __init__(self, out: Path | None, command: dict[str, Any]) -> None:
        self.out, self.command = out, command
        self.chosen: list[Any] | None = None
        self.file: IO[str] | None = None
        if out is not None:
            self.path = out.with_name(f"{out.name}.partial")
            self.about = out.with_name(f"{out.name}.partial.json")

    def resume(self) -> tuple[int, list[str]]:
        """Return the number of lines that an earlier, equal command wrote, and these lines; cut off a broken one.

        Raises ValueError if another command wrote them.
        """
        if self.out is None or not self.about.is_file() or not self.path.is_file():
            return 0, []
        known = parse_json(self.about.read_text(), str(self.about))
        if not isinstance(known, dict) or known.get("command") != self.command:
            count = self.path.read_bytes().count(b"\n")
            what = f"{self.path} has {count:,} lines of another command, text or option"
            raise ValueError(f"{what}: repeat that command, delete the file, or pass another --out")
        text = self.path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        with self.path.open("r+b") as file:
            file.truncate(len(whole))
        self.chosen = known["chosen"]
        lines = whole.decode().split("\n")[:-1]
        return len(lines), lines

    def begin(self, chosen: list[Any]) -> None:
        """Note what was chosen, and start an empty partial file."""
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)
            write_text(self.about, json.dumps({"command": self.command, "chosen": chosen}, indent=1))

    def write(self, lines: Iterable[str]) -> None:
        """Append lines, and make sure that they are on disk."""
        text = "".join(f"{line}\n" for line in lines)
        if self.out is None:
            sys.stdout.write(text)
            return
        with explain_errors(self.path):
            if self.file is None:
                self.file = self.path.open("a", encoding="utf-8")
            self.file.write(text)
            self.file.flush()
            os.fsync(self.file.fileno())

    def finish(self) -> None:
        """Give the file its final name."""
        if self.out is None:
            return
        self.close()
        with explain_errors(self.out):
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            self.path.replace(self.out)
            with suppress(FileNotFoundError):
                self.about.unlink()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def __enter__(self) -> "PartialLinks":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
