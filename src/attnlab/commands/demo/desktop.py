"""Open a page in the browser if there is a desktop."""

import os
import sys
import webbrowser
from collections.abc import Mapping
from pathlib import Path


def has_desktop(platform: str, environment: Mapping[str, str], *, interactive: bool) -> bool:
    """Return whether a browser can be opened: a terminal, a display, no CI, no remote shell."""
    if not interactive or environment.get("CI") or environment.get("SSH_CONNECTION"):
        return False
    shown = environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY")
    return platform in ("darwin", "win32") or bool(shown)


def open_page(page: Path) -> bool:
    """Open a page in the browser if there is a desktop; return whether it was opened."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if not has_desktop(sys.platform, os.environ, interactive=interactive):
        return False
    return webbrowser.open(page.absolute().as_uri())
