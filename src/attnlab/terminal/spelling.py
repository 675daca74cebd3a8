"""One convention for every command, in either spelling.

key=value says what a thing is made of, and --option how the command runs. A command understands the other spelling too:

    attnlab train synthetic steps=300 --out runs/first        as the pages write it
    attnlab train synthetic --steps 300 out=runs/first        the same
"""

import re
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from typer.core import TyperGroup, TyperOption

from attnlab.config import parse_value, suggest_nearest

SETTINGS = "settings"  # the argument of a command that takes key=value
NEXT = re.compile(r"--$|--?[A-Za-z]|\w+=")  # an option or a key=value, not the value of the option before it


class EitherSpelling(TyperGroup):
    """Commands that take options as key=value, and key=value as options."""

    named: Collection[str] = ()  # the options of the command that runs, if errors name them as options

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ValueError as error:
            if len(error.args) == 1 and isinstance(error.args[0], str):
                error.args = (name_options(error.args[0], self.named),)
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, words = super().resolve_command(ctx, args)
        if command is None or isinstance(command, TyperGroup):
            return name, command, words
        parameters = command.get_params(ctx)
        options = {key: each for each in parameters if isinstance(each, TyperOption) for key in each.opts}
        options |= {key: each for each in parameters if isinstance(each, TyperOption) for key in each.secondary_opts}
        takes_settings = any(each.name == SETTINGS for each in parameters)
        self.named = () if takes_settings else [name for name in options if name.startswith("--")]
        return name, command, respell(words, options, settings=takes_settings, partial=ctx.resilient_parsing)


def respell(words: Sequence[str], options: Mapping[str, Any], *, settings: bool, partial: bool = False) -> list[str]:
    """Return the words of a command in the convention.

    options    the options of the command by their names, such as --out
    settings   whether the command takes key=value; if it does, an unknown option becomes one
    partial    the words are being completed: --key at the end becomes key=, and nothing is refused
    """
    queue = deque(words)
    result: list[str] = []
    given: dict[str, str] = {}
    while queue:
        word = queue.popleft()
        name, equals, value = word.partition("=")
        if word == "--":
            return [*result, word, *queue]
        if not word.startswith("-") and equals and (option := options.get(name_option(name))):
            new = ([word] if settings and not queue else []) if partial else _write_option(option, name, value)
        elif not (settings or partial) and equals and name.isidentifier() and (near := _suggest(name, options)):
            raise ValueError(f"unknown key {name!r}{near}; write ./{word} if it is a file")
        elif not word.startswith("--") or not settings or name in options:
            option = options.get(name)
            count = 0 if equals or option is None or option.is_flag else option.nargs
            new = [word, *(queue.popleft() for _ in range(min(count, len(queue))))]
            if partial and len(new) <= count:
                new = []  # its value is being completed
        else:
            option, new = None, [_write_setting(name, equals, value, queue, partial)]
        if option is not None and not option.multiple and not partial:
            text = " ".join(new)
            if option.name in given:
                raise ValueError(f"{name.lstrip('-')} is given twice: {given[option.name]} and {text}")
            given[option.name] = text
        result += new
    return result


def name_option(key: str) -> str:
    """Return the option that a key may stand for: best_on_text gives --best-on-text."""
    return f"--{key.replace('_', '-')}"


def name_options(message: str, options: Collection[str]) -> str:
    """Return an error with settings written as options: "top_k must be 1; use dtype=x" gives "--top-k … --dtype x".

    A flag that is named in both spellings, "--again (again=True)", is named once.
    """
    for option in options:
        key = option.removeprefix("--").replace("-", "_")
        message = message.replace(f"{option} ({key}=True)", option)
        message = re.sub(rf"^{key}s?(?= must )", option, message)
        message = re.sub(rf"(?<![\w./-]){key}=(?:'([^']*)'|(?=[\w.,/~-]))", rf"{option} \1", message)
    return message


def _suggest(key: str, options: Mapping[str, Any]) -> str:
    return suggest_nearest(key, [name.removeprefix("--").replace("-", "_") for name in options])


def _write_option(option: Any, key: str, value: str) -> list[str]:
    """Return key=value as an option."""
    name = option.opts[0]
    if option.is_flag:
        chosen = option.opts if parse_value(value, bool, key) else option.secondary_opts
        return list(chosen[:1])
    if option.nargs != 1:
        raise ValueError(f"{key}={value}: {key} takes {option.nargs} values; write {name} {option.metavar}")
    return [f"{name}={part}" for part in (value.split(",") if option.multiple else [value])]


def _write_setting(name: str, equals: str, value: str, queue: deque[str], partial: bool) -> str:
    """Return --key value as key=value. Without a value, --key is true and --no-key is false."""
    key = name.removeprefix("--").replace("-", "_")
    if equals:
        return f"{key}={value}"
    if queue and not NEXT.match(queue[0]):
        return f"{key}={queue.popleft()}"
    if partial and not queue:
        return f"{key}="
    return f"{key.removeprefix('no_')}=false" if key.startswith("no_") else f"{key}=true"
