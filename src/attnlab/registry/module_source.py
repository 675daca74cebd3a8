"""Read modules without importing them: docstrings, options and fields, for listings and completion.

Importing a mechanism imports torch, which takes seconds. Parsing its file takes a millisecond.
"""

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True)
class FieldNote:
    """A field of a dataclass: its name, type and default value, and the sentence in the comment behind it."""

    name: str
    hint: Any
    default: Any
    sentence: str


class ModuleSource:
    """The parsed source of one module."""

    def __init__(self, module: str) -> None:
        loader: Any = getattr(find_spec(module), "loader", None)
        text = loader.get_source(module) if hasattr(loader, "get_source") else None
        if text is None:
            raise ImportError(f"the source of {module} cannot be read")
        self.module, self.lines, self.tree = module, text.splitlines(), ast.parse(text)
        self.file = getattr(loader, "path", module)

    def find_class(self, name: str) -> tuple["ModuleSource", ast.ClassDef]:
        """Return a class and the module that defines it."""
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return self, node
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("attnlab."):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return open_source(node.module).find_class(alias.name)
        raise ImportError(f"{self.file} has no class {name}")

    def get_value(self, name: str) -> Any:
        """Return the value of a constant or an alias at the top of the module."""
        for node in self.tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=known)], value=value) if known == name:
                    return self.evaluate(value)
                case ast.AnnAssign(target=ast.Name(id=known), value=ast.expr() as value) if known == name:
                    return self.evaluate(value)
                case ast.ImportFrom(module=str() as module, names=names):
                    for alias in names:
                        if (alias.asname or alias.name) == name:
                            ours = module.startswith("attnlab.")
                            there = open_source(module).get_value if ours else vars(import_module(module)).__getitem__
                            return there(alias.name)
        raise ImportError(f"{self.module} has no constant {name}")

    def evaluate(self, expression: ast.expr) -> Any:
        """Return the value of an expression of constants, aliases and names of the standard library."""
        names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
        space = {name: self.get_value(name) for name in names if not hasattr(builtins, name)}
        return eval(compile(ast.Expression(expression), self.module, "eval"), space)

    def list_calls(self, function: str) -> Iterator[tuple[str, ast.Call]]:
        """Yield the values of dicts that call a function, with their keys."""
        for node in (node for node in ast.walk(self.tree) if isinstance(node, ast.Dict)):
            for key, value in zip(node.keys, node.values, strict=True):
                match key, value:
                    case ast.Constant(value=str() as name), ast.Call(func=ast.Name(id=known)) if known == function:
                        yield name, value


@cache
def open_source(module: str) -> ModuleSource:
    """Read and parse a module once."""
    return ModuleSource(module)


def read_summary(place: str) -> str:
    """Return the first line of the docstring of the module of "module:Name"."""
    return (ast.get_docstring(open_source(place.partition(":")[0]).tree) or "").split("\n")[0].rstrip(".:")


def list_options(place: str) -> list[str]:
    """Return the keyword-only arguments of the constructor of the class at "module:Class", then of its bases."""
    module, _, name = place.partition(":")
    here, node = open_source(module).find_class(name)
    options: list[str] = []
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            options += [argument.arg for argument in part.args.kwonlyargs]
            if part.args.kwarg is None:
                return options
    for base in node.bases:
        if isinstance(base, ast.Name):
            try:
                there, _ = here.find_class(base.id)
            except ImportError:  # a base that is not ours
                continue
            options += list_options(f"{there.module}:{base.id}")
    return list(dict.fromkeys(options))


def list_fields(place: str) -> list[FieldNote]:
    """Return the fields of the dataclass at "module:Class" that have a default, without those of its bases."""
    module, _, name = place.partition(":")
    here, node = open_source(module).find_class(name)
    notes = []
    for part in node.body:
        match part:
            case ast.AnnAssign(target=ast.Name(id=key), annotation=hint, value=ast.expr() as value):
                behind = here.lines[(part.end_lineno or 1) - 1].encode()[part.end_col_offset or 0 :].decode()
                sentence = behind.partition("#")[2].strip()
                notes.append(FieldNote(key, here.evaluate(hint), here.evaluate(value), sentence))
    return notes
