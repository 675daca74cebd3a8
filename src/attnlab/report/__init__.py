"""Figures, one self-contained HTML page and the viewer, from tables and Records."""
