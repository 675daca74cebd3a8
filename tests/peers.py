"""Packages of other people that some tests need, and that make test does without."""

import importlib.util
import os

import pytest


def need(*names: str) -> pytest.MarkDecorator:
    """Skip a module's tests where a package is missing; with ATTNLAB_REQUIRE_ECOSYSTEM, they run and fail."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    required = bool(os.environ.get("ATTNLAB_REQUIRE_ECOSYSTEM"))
    reason = f"{', '.join(missing)} not installed: make test-ecosystem"
    return pytest.mark.skipif(bool(missing) and not required, reason=reason)
