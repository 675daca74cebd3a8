"""The colours of figures. They match the viewer, so a page has one colour scale.

Positive numbers go from the page's background to blue, negative ones to orange; masked cells (NaN) are grey.
viewer/colour.js has the same stops.
"""

from matplotlib.colors import Colormap, LinearSegmentedColormap

POSITIVE = ("#fbfcfe", "#d6e6f4", "#9dc6e6", "#4f9bd0", "#1767ad", "#08306b")
NEGATIVE = ("#fbfcfe", "#fde3cb", "#fbbd85", "#f08d3f", "#cf5a0b", "#7a2e02")
HIDDEN = "#e9ecf1"  # masked cells
GOLD = "#D1006C"  # frames of gold links
SEQUENTIAL = LinearSegmentedColormap.from_list("attnlab", POSITIVE).with_extremes(bad=HIDDEN)
DIVERGING = LinearSegmentedColormap.from_list("attnlab-signed", (*reversed(NEGATIVE), *POSITIVE[1:])).with_extremes(
    bad=HIDDEN
)


def choose_colormap(*, signed: bool) -> Colormap:
    """Return the diverging map for signed numbers, else the sequential one."""
    return DIVERGING if signed else SEQUENTIAL
