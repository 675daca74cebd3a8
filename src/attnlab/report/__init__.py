"""Tables and Records become figures and one self-contained HTML page."""
