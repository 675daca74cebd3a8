"""Numbers as text, for tables and pages: with a minus sign, not a hyphen."""

import math


def format_real(x: float, form: str = ".4g") -> str:
    """Return a number in a format of Python's, or a dash if it is not finite."""
    return format(x, form).replace("-", "−") if math.isfinite(x) else "–"


def format_percent(share: float, decimals: int | None = None) -> str:
    """Return '12 %'; by default with a decimal below 10 %."""
    if decimals is None:
        decimals = 0 if share >= 0.0995 else 1
    return f"{100 * share:.{decimals}f}\N{NO-BREAK SPACE}%"
