"""Configurations as frozen dataclasses: parse command-line values into them and name them by a digest."""

import dataclasses
import difflib
import hashlib
import json
import sys
import types
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")


def suggest_nearest(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean …?)" with the most similar known word, or "" if none is similar."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def check_fields(config: Any, *, minima: Mapping[str, int] = types.MappingProxyType({})) -> None:
    """Raise ValueError for a field outside its Literal values, or an integer below its minimum, by default 1."""
    for name, hint in get_type_hints(type(config)).items():
        value, minimum = getattr(config, name), minima.get(name, 1)
        if get_origin(hint) is Literal and value not in get_args(hint):
            guess = suggest_nearest(str(value), get_args(hint))
            raise ValueError(f"{name} must be one of {', '.join(get_args(hint))}, got {value!r}{guess}")
        if hint in (int, int | None) and value is not None and value < minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {value}")


def check_types(values: Mapping[str, Any], config_type: type) -> None:
    """Raise ValueError for a stored value that is not of the type its field declares."""
    for name, hint in get_type_hints(config_type).items():
        if name in values and not _has_type(values[name], hint):
            raise ValueError(f"{name} must be {describe_type(hint)}, got {values[name]!r:.60}")


def _has_type(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_has_type(value, argument) for argument in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple and isinstance(value, tuple):
        kinds = arguments[:1] * len(value) if arguments[1:] == (...,) else arguments
        return len(value) == len(kinds) and all(map(_has_type, value, kinds))
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return hint is Any or isinstance(value, origin or hint)


def split_pairs(words: Iterable[str]) -> dict[str, str]:
    """Split key=value words: ['a=1', 'b=x'] -> {'a': '1', 'b': 'x'}. Raises ValueError for a repeated key."""
    pairs: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ValueError(f"{word!r} must have the form key=value")
        if key in pairs:
            raise ValueError(f"{key} is given twice: {pairs[key]!r} and {value!r}")
        pairs[key] = value
    return pairs


def write_given(**options: object) -> dict[str, str]:
    """Return the options that are not None as texts, like the pairs of `split_pairs`."""
    return {key: str(value) for key, value in options.items() if value is not None}


def parse_value(text: str, hint: Any, key: str) -> Any:
    """Parse a command-line value as the type that a field or an option declares."""
    if hint is Any:
        return _guess_value(text)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if type(None) in arguments and text.lower() in ("none", ""):
            return None
        for argument in (a for a in arguments if a is not type(None)):
            try:
                return parse_value(text, argument, key)
            except ValueError:
                continue
    elif origin is Literal:
        if text in arguments:
            return text
    elif origin is tuple:
        parts = [part.strip() for part in text.strip("()").split(",") if part.strip()]
        kinds = [arguments[0]] * len(parts) if arguments[1:] == (...,) else list(arguments)
        if len(parts) == len(kinds):
            return tuple(parse_value(part, kind, key) for part, kind in zip(parts, kinds, strict=True))
    elif hint is bool:
        if text.lower() in ("true", "yes", "on", "1", "false", "no", "off", "0"):
            return text.lower() in ("true", "yes", "on", "1")
    elif hint in (int, float):
        try:
            number = hint(text.replace("_", ""))
        except ValueError:
            pass
        else:
            if _has_type(number, hint):
                return number
            raise ValueError(f"{key}={text:.60}: the number is not finite or too large")
    elif hint is str:
        return text
    raise ValueError(f"{key}={text:.60}: expected {describe_type(hint)}")


def describe_type(hint: Any) -> str:
    """Name the values that a type allows, for people: int | None gives "a whole number or none"."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(argument) for argument in arguments)
    if hint is type(None):
        return "none"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(hint, "values separated by commas" if origin is tuple else str(hint))


def parse_values(values: Mapping[str, str], types: Mapping[str, Any]) -> dict[str, Any]:
    """Parse command-line values of these types. Raises ValueError for the first unknown key, with the nearest known."""
    for key in values:
        if key not in types:
            known = ", ".join(types)
            raise ValueError(f"unknown key {key!r}{suggest_nearest(key, types)}; the known keys are {known}")
    return {key: parse_value(text, types[key], key) for key, text in values.items()}


def parse_numbers(text: str | None, key: str) -> tuple[int, ...] | None:
    """Parse comma-separated numbers and ranges below a million, sorted: 0,2-4 gives 0, 2, 3, 4."""
    if text is None:
        return None
    numbers: set[int] = set()
    for part in text.split(","):
        ends = part.strip().split("-")
        if not all(end.isdecimal() and len(end) < 7 for end in ends) or len(ends) > 2 or int(ends[0]) > int(ends[-1]):
            raise ValueError(f"{key}={text:.60}: expected whole numbers and ranges below a million, for example 0,2-4")
        numbers.update(range(int(ends[0]), int(ends[-1]) + 1))
    return tuple(sorted(numbers))


def replace_values(config: C, values: Mapping[str, str]) -> C:
    """Return the configuration with values from the command line. Raises ValueError for an unknown key."""
    return dataclasses.replace(config, **parse_values(values, get_type_hints(type(config))))


FREE_KEYS = ("out", "device", "logging", "data_dir")  # where a run is stored and computed; not part of the digest


def compute_digest(config: Any, *, without: Iterable[str] = FREE_KEYS) -> str:
    """Return twelve hexadecimal digits that name a configuration, ignoring the keys in `without` at every level."""
    ignored = set(without)

    def drop_ignored(value: Any) -> Any:
        return {k: drop_ignored(v) for k, v in value.items() if k not in ignored} if isinstance(value, dict) else value

    values = drop_ignored(dataclasses.asdict(config))
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _guess_value(text: str) -> Any:
    for hint in (int, float, bool):
        try:
            return parse_value(text, hint, "")
        except ValueError:
            continue
    return text
