"""The commands `attnlab ledger show` and `attnlab ledger merge`."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from attnlab.commands.arguments import Pairs
from attnlab.terminal import Interruptible

ledger = typer.Typer(
    cls=Interruptible, help="List the rows of a ledger of measured runs, or merge ledgers.", no_args_is_help=True
)


@ledger.command("show")
def show_rows(
    path: Annotated[Path, Argument(help="A ledger file or its folder, such as results/snell2021.")],
    settings: Pairs = None,
    limit: Annotated[int | None, Option(help="Largest number of rows to show.")] = None,
) -> None:
    """List the rows of a ledger. key=value selects rows by recipe key, seed, measure or edition."""
    from attnlab.commands.ledger_command import show_ledger

    show_ledger(path, settings or [], limit=limit)


@ledger.command("merge")
def merge(
    paths: Annotated[list[Path], Argument(metavar="LEDGER…", help="Ledger files or their folders.")],
    out: Annotated[Path, Option(help="File to write.")] = Path("ledger.jsonl"),
) -> None:
    """Join ledgers of several machines into one. Different values of the same run are an error that names them."""
    from attnlab.commands.ledger_command import merge_files

    merge_files(paths, out)
