"""Colours of figures: those of the viewer, so that one page has one scale.

Numbers from 0 go from the page's ground to blue; where some are negative a second arm goes to orange. viewer/colour.js
has the same stops.
"""

from matplotlib.colors import Colormap, LinearSegmentedColormap

POSITIVE = ("#fbfcfe", "#d6e6f4", "#9dc6e6", "#4f9bd0", "#1767ad", "#08306b")
NEGATIVE = ("#fbfcfe", "#fde3cb", "#fbbd85", "#f08d3f", "#cf5a0b", "#7a2e02")
GOLD = "#D1006C"  # frames of true links
SEQUENTIAL = LinearSegmentedColormap.from_list("attnlab", POSITIVE)
DIVERGING = LinearSegmentedColormap.from_list("attnlab-signed", (*reversed(NEGATIVE), *POSITIVE[1:]))


def choose_colormap(*, signed: bool) -> Colormap:
    return DIVERGING if signed else SEQUENTIAL
