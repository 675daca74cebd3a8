"""A figure beside a page and on it: written for papers, and as the part that a page shows."""

from pathlib import Path

from matplotlib.figure import Figure

from attnlab.files import write_bytes
from attnlab.report.figures import render_files
from attnlab.report.page import Picture


def save_figure(stem: Path, figure: Figure, says: str) -> Picture:
    """Write stem.png, .svg and .pdf."""
    files = render_files(figure)
    for suffix, drawn in files.items():
        write_bytes(stem.with_name(stem.name + suffix), drawn)
    return Picture(files[".png"], says)
