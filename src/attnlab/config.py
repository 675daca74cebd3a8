"""Configurations as frozen dataclasses: parse command-line values, check them, and name configurations by a digest.

A field declares its range beside its type, as Annotated[float, "[0, 1)"] or one of the names below. A whole number
without a range must be at least 1, a number without one must be finite.
"""

import dataclasses
import difflib
import hashlib
import json
import math
import types
from collections.abc import Iterable, Mapping
from functools import cache
from numbers import Integral, Real
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")

Natural = Annotated[int, "[0, inf)"]
Positive = Annotated[float, "(0, inf)"]
NonNegative = Annotated[float, "[0, inf)"]
Share = Annotated[float, "(0, 1)"]
Probability = Annotated[float, "[0, 1)"]  # of dropping something
LengthPenalty = Annotated[float, "[-10, 10]"]  # beyond, length^penalty is not representable
DEFAULTS = {int: "[1, inf)", float: "(-inf, inf)"}
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
LARGEST = 2**53  # whole numbers up to here are exact in JSON and as floating-point numbers
LARGEST_FLOAT = 3e38  # in float32


def suggest_nearest(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean …?)" with the most similar known word, or "" if none is similar."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def check_fields(config: Any) -> None:
    """Raise ValueError for a field of a dataclass whose value its type does not allow; see `check_value`."""
    kind: Any = type(config)
    for name, hint in _read_hints(kind).items():
        check_value(name, getattr(config, name), hint)


def refuse_unused(config: Any, names: Iterable[str], chosen: str, needed: str) -> None:
    """Raise ValueError if one of these fields differs from its default, since it has no effect with what is chosen."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name in names:
        if (value := getattr(config, name)) != defaults[name]:
            raise ValueError(f"{name}={value} has no effect with {chosen}: leave it out, or choose {needed}")


def check_value(name: str, value: Any, hint: Any) -> None:
    """Raise ValueError for a value of another type, outside its Literal values or its range, or not finite.

    Numbers in mappings, such as the options of an attention, must be finite. Other types allow any value.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        _check_union(name, value, arguments)
    elif origin is Literal:
        if value not in arguments:
            guess = suggest_nearest(str(value), map(str, arguments))
            raise ValueError(f"{name} must be {describe_type(hint)}, got {value!r}{guess}")
    elif origin is tuple:
        if not isinstance(value, tuple | list) or (len(value) != len(arguments) and ... not in arguments):
            raise ValueError(f"{name} must be {describe_type(hint)}, got {value!r}")
        for each, kind in zip(value, arguments[:1] * len(value) if ... in arguments else arguments, strict=True):
            check_value(name, each, kind)
    elif isinstance(value, Mapping) or origin is Mapping:
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} must be options with names, got {value!r}")
        for key, each in value.items():
            check_value(key, each, Any)
    elif hint is Any:
        for number in [x for x in (value if isinstance(value, tuple | list) else [value]) if isinstance(x, float)]:
            _check_plain(name, number, float, DEFAULTS[float])
    else:
        _check_plain(name, value, *(arguments if origin is Annotated else (hint, DEFAULTS.get(hint))))


def _check_union(name: str, value: Any, kinds: tuple[Any, ...]) -> None:
    """Check that one kind allows the value; the error is that of the first kind for a number, else of the last."""
    if value is None and types.NoneType in kinds:
        return
    errors = []
    for kind in (kind for kind in kinds if kind is not types.NoneType):
        try:
            return check_value(name, value, kind)
        except ValueError as error:
            errors.append(error)
    raise errors[0 if isinstance(value, Real) else -1]


def _check_plain(name: str, value: Any, kind: Any, interval: str | None) -> None:
    """Check a number, text, or true or false."""
    known: dict[Any, type] = {int: Integral, float: Real, bool: bool, str: str}
    if not isinstance(value, known.get(kind, object)) or (interval and isinstance(value, bool)):
        raise ValueError(f"{name} must be {describe_type(kind)}, got {value!r}")
    if interval is None:
        return
    number: Any = value
    has_low, low, high, has_high = _split_interval(interval)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    if abs(number) > (largest := LARGEST if isinstance(value, Integral) else LARGEST_FLOAT):
        raise ValueError(f"{name} must be between {-largest:g} and {largest:g}, got {value}")
    if not ((number >= low if has_low else number > low) and (number <= high if has_high else number < high)):
        raise ValueError(f"{name} must be {describe_interval(interval)}, got {value}")


def describe_interval(interval: str) -> str:
    """Describe a range in words: "[0, 1)" gives "at least 0 and below 1"; a range without ends gives ""."""
    has_low, low, high, has_high = _split_interval(interval)
    ends = [f"{'at least' if has_low else 'above'} {low:g}"] if math.isfinite(low) else []
    ends += [f"{'at most' if has_high else 'below'} {high:g}"] if math.isfinite(high) else []
    return " and ".join(ends)


def _split_interval(interval: str) -> tuple[bool, float, float, bool]:
    """Split "[0, 1)": whether the lower end belongs to it, both ends, whether the upper end belongs to it."""
    low, _, high = interval[1:-1].partition(",")
    return interval[0] == "[", float(low), float(high), interval[-1] == "]"


@cache
def _read_hints(kind: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields, with their ranges."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


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


def split_list(text: str, key: str, *, repeats: bool = False) -> list[str]:
    """Return the values of key=text, one or more. Commas separate, except inside brackets or double quotes.

    lr=5e-4,1e-3                     two values: a grid
    betas=(0.9,0.98),(0.9,0.999)     two pairs
    data='"my, own.txt"'             one value with a comma; the double quotes are removed
    attention=coda,dagpam(initial=0.5,fixed=true)      the second attention has its own options

    Raises ValueError for an unbalanced or empty value, and for a repeated one unless `repeats`.
    """
    parts, depth, quoted = [""], 0, False
    for character in text:
        if character == '"':
            quoted = not quoted
            continue
        if not quoted:
            depth += (character in "({") - (character in ")}")
            if depth < 0:
                break
            if character == "," and depth == 0:
                parts.append("")
                continue
        parts[-1] += character
    if quoted or depth:
        raise ValueError(f"{key}={text}: unbalanced {'double quote' if quoted else 'bracket'}")
    if len(parts) > 1 and not all(part.strip() for part in parts):
        raise ValueError(f"{key}={text}: a value between commas is empty; remove the extra comma")
    if not repeats and (twice := next((part for part in parts if parts.count(part) > 1), None)):
        raise ValueError(f"{key}={text}: {twice} is given twice")
    return parts


def write_given(**options: object) -> dict[str, str]:
    """Return the options that are not None as texts, like the pairs of `split_pairs`."""
    return {key: str(value) for key, value in options.items() if value is not None}


def parse_value(text: str, hint: Any, key: str) -> Any:
    """Parse a command-line value as the type that a field or an option declares."""
    if hint is Any:
        return _guess_value(text, key)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return parse_value(text, arguments[0], key)
    if origin in (Union, types.UnionType):
        if type(None) in arguments and text.lower() in ("none", ""):
            return None
        for argument in (a for a in arguments if a is not type(None)):
            try:
                return parse_value(text, argument, key)
            except ValueError:
                continue
    elif origin is Literal:
        if text in (named := {str(argument): argument for argument in arguments}):
            return named[text]
    elif origin is tuple:
        parts = [part.strip() for part in text.strip("()").split(",") if part.strip()]
        kinds = [arguments[0]] * len(parts) if arguments[1:] == (...,) else list(arguments)
        if len(parts) == len(kinds):
            return tuple(parse_value(part, kind, key) for part, kind in zip(parts, kinds, strict=True))
    elif hint is bool:
        if text.lower() in (*TRUE, *FALSE):
            return text.lower() in TRUE
    elif hint in (int, float):
        try:
            number = _parse_whole(text.replace("_", "")) if hint is int else float(text.replace("_", ""))
        except ValueError:
            pass
        else:
            if abs(number) <= (LARGEST if hint is int else LARGEST_FLOAT):  # False for nan
                return number
            raise ValueError(f"{key}={text:.60}: the number is too large or not finite")
    elif hint is str:
        return text
    raise ValueError(f"{key}={text:.60}: expected {describe_type(hint)}")


def _parse_whole(text: str) -> int:
    """Parse 1000, 1e3 or 1000.0. Raises ValueError for a number that is not whole."""
    if text.lstrip("+-").isdecimal():
        return int(text)
    number = float(text)
    if not number.is_integer():  # also for inf and nan
        raise ValueError(text)
    return int(number)


def describe_type(hint: Any) -> str:
    """Name the values that a type allows, for people: int | None gives "a whole number or none"."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is Annotated:
        return f"{describe_type(arguments[0])} ({describe_interval(arguments[1])})"
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(argument) for argument in arguments)
    if hint is type(None):
        return "none"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if origin is tuple:
        return f"{'' if arguments[1:] == (...,) else f'{len(arguments)} '}values separated by commas"
    return names.get(hint, str(hint))


def parse_values(values: Mapping[str, str], types: Mapping[str, Any]) -> dict[str, Any]:
    """Parse command-line values of these types. Raises ValueError for the first unknown key, with the nearest known."""
    for key in values:
        if key not in types:
            known = ", ".join(types)
            raise ValueError(f"unknown key {key!r}{suggest_nearest(key, types)}; the known keys are {known}")
    parsed = {key: parse_value(text, types[key], key) for key, text in values.items()}
    for key, value in parsed.items():
        check_value(key, value, types[key])
    return parsed


def parse_numbers(text: str | None, key: str) -> tuple[int, ...] | None:
    """Parse comma-separated numbers and ranges below a million, sorted: 0,2-4 gives 0, 2, 3, 4."""
    if text is None:
        return None
    numbers: set[int] = set()
    for part in text.split(","):
        ends, given = part.strip().split("-"), f"{key}{' ' if key.startswith('--') else '='}{text:.60}"
        if not all(end.isdecimal() and len(end) < 7 for end in ends) or len(ends) > 2:
            raise ValueError(f"{given}: expected whole numbers and ranges below a million, for example 0,2-4")
        if int(ends[0]) > int(ends[-1]):
            raise ValueError(f"{given}: a range goes upwards, as {ends[-1]}-{ends[0]}")
        numbers.update(range(int(ends[0]), int(ends[-1]) + 1))
    return tuple(sorted(numbers))


def write_ranges(numbers: Iterable[int]) -> list[str]:
    """Return ascending numbers as a person writes them: 1, 2, 3, 7 gives "1-3", "7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]


def check_known(chosen: Iterable[int] | None, known: Iterable[int], owner: str, part: str) -> None:
    """Raise ValueError for a number that no part of the owner has, such as a layer of a record."""
    numbers = sorted(set(known))
    if absent := sorted(set(chosen or ()) - set(numbers)):
        raise ValueError(f"{owner} has no {part} {absent[0]}; its {part}s are {', '.join(write_ranges(numbers))}")


def replace_values(config: C, values: Mapping[str, str]) -> C:
    """Return the configuration with values from the command line. Raises ValueError for an unknown key."""
    return dataclasses.replace(config, **parse_values(values, _read_hints(type(config))))


FREE_KEYS = ("out", "device", "logging", "data_dir")  # where a run is stored and computed; not part of the digest


def compute_digest(config: Any, *, without: Iterable[str] = FREE_KEYS) -> str:
    """Return twelve hexadecimal digits that name a configuration, ignoring the keys in `without` at every level."""
    ignored = set(without)

    def drop_ignored(value: Any) -> Any:
        return {k: drop_ignored(v) for k, v in value.items() if k not in ignored} if isinstance(value, dict) else value

    values = drop_ignored(dataclasses.asdict(config))
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _guess_value(text: str, key: str) -> Any:
    """Parse a value whose type is not declared: a whole number, a number, true or false, else text."""
    if text.replace("_", "").lstrip("+-").isdecimal():
        return parse_value(text, int, key)
    try:
        float(text)
    except ValueError:
        return parse_value(text, bool, key) if text.lower() in (*TRUE, *FALSE) else text
    return parse_value(text, float, key)


def describe_error(error: BaseException) -> str:
    """Return the first paragraph of an error as one line, with its type unless the message alone says what to do."""
    try:
        message = " ".join(str(error).strip().partition("\n\n")[0].split())
    except Exception:  # by a user's own exception
        message = "without a message"
    plain = isinstance(error, ValueError | OSError) and message
    return message if plain else f"{type(error).__name__}: {message}".removesuffix(": ")
