"""Registries: names and the objects they stand for, imported when they are looked up."""

from collections import UserDict
from collections.abc import Mapping
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")


class Registry(UserDict[str, T]):
    """A dict of objects by name. A value "module:Name" is imported when it is looked up."""

    def __init__(self, places: Mapping[str, T | str]) -> None:
        super().__init__(places)  # type: ignore[arg-type]  # a place stands for its object

    def __getitem__(self, name: str) -> T:
        value = self.data[name]
        return import_place(value) if isinstance(value, str) else value

    def get_place(self, name: str) -> str:
        """Return the "module:Name" of a name, without importing it."""
        value: Any = self.data[name]
        return value if isinstance(value, str) else f"{value.__module__}:{value.__qualname__}"


def import_place(place: str) -> Any:
    """Import the object at "module:Name"."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
