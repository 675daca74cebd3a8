"""What the command line prints: a progress bar or plain lines, tables, and how to resume after an interruption."""

import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnlab.terminal.spelling import EitherSpelling

SECONDS = 10  # between two lines of progress where there is no terminal
LONG = 50  # a first column up to this many characters is not wrapped


class Bar:
    """Progress on standard error: a bar on a terminal, plain lines elsewhere."""

    def __init__(self, steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.console = Console(stderr=True, emoji=False)
        columns = [BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}")]
        self.bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.task = self.bar.add_task("", total=steps)
        self.last_line_time = time.monotonic()  # when a line last said how far it is

    def __enter__(self) -> "Bar":
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def tick(self, done: int, total: int, what: str = "") -> None:
        self.bar.update(self.task, completed=done, total=total, description=what)
        if self.bar.disable and time.monotonic() - self.last_line_time >= SECONDS:
            self.last_line_time = time.monotonic()
            self.note(f"{done:,} of {total:,}  {what}".rstrip())

    def note(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=not self.console.is_terminal)

    def show(self, values: dict[str, Any]) -> None:
        """Show one measurement of a training: as a line if it is a validation or there is no bar."""
        line = "  ".join(
            f"{key} {x:,.0f}" if key == "tokens_per_second" else f"{key} {x:.4g}"
            for key, x in values.items()
            if key != "step"
        )
        if self.bar.disable or "valid_loss" in values:
            self.note(f"step {values['step']}  {line}")
        self.bar.update(self.task, completed=values["step"], description="" if "valid_loss" in values else line)


class Interruptible(EitherSpelling):
    """Commands that print "interrupted" on Ctrl-C, where Typer alone prints nothing."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.stderr.write("attnlab: interrupted\n")
            raise typer.Exit(130) from None


@contextmanager
def resumable() -> Iterator[None]:
    """On Ctrl-C inside this context, print the command that resumes, and exit with status 130."""
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write(f"attnlab: stopped, nothing is lost; to resume: {command_line()}\n")
        raise typer.Exit(130) from None


def command_line() -> str:
    """Return the command as the user typed it, quoted for a shell."""
    return shlex.join(["attnlab", *sys.argv[1:]])


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table. Its first column is wrapped only if it is wider than LONG."""
    fits = max((len(str(row[0])) for row in rows), default=0) <= LONG
    table = Table(title=Text(title), title_justify="left", title_style="bold", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=number == 0 and fits)
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() or os.environ.get("COLUMNS") else 140, emoji=False).print(table)
    print()
