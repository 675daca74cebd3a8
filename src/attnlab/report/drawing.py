"""Save a figure beside a page, and return it as a part of the page."""

from pathlib import Path

from matplotlib.figure import Figure

from attnlab.files import write_bytes
from attnlab.report.figures import render_files
from attnlab.report.page import Picture


def save_figure(stem: Path, figure: Figure, caption: str) -> Picture:
    """Write stem.png, stem.svg and stem.pdf. Returns the picture for a page."""
    files = render_files(figure)
    for suffix, data in files.items():
        write_bytes(stem.with_name(stem.name + suffix), data)
    return Picture(files[".png"], caption)
