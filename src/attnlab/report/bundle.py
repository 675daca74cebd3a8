"""The scripts and styles of a page: the plain modules in viewer/, joined into one text.

A module imports with lines `import { a, b } from "./other.js";` and marks its exports with `export` at the start of a
line. When joined, each module becomes a function that is called once and returns its exports:

    const other_js = (() => { … return { a, b }; })();

So a browser needs no build and no network, and each module has its own namespace. The page's content security policy
allows only this script and this style, by their hashes: code from data cannot run.
"""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w-]+\.js)";$', re.MULTILINE)
EXPORT = re.compile(r"^export ((?:async )?(?:function|class|const|let) (\w+))", re.MULTILINE)
STYLES = ("page.css", "viewer.css")


@cache
def join_scripts(entries: tuple[str, ...]) -> str:
    """Join these modules and their imports, each once and after its own imports."""
    joined: dict[str, str] = {}

    def join(name: str, above: tuple[str, ...] = ()) -> None:
        if name in above:
            raise ValueError(f"{name} has a circular import: {' → '.join(above)}")
        if name in joined:
            return
        text = _read_file(name)
        for _, other in IMPORT.findall(text):
            join(other, (*above, name))
        exports = ", ".join(export for _, export in EXPORT.findall(text))
        body = IMPORT.sub(lambda m: f"const {{{m[1]}}} = {_name_module(m[2])};", EXPORT.sub(r"\1", text))
        joined[name] = f"const {_name_module(name)} = (() => {{\n{body}return {{ {exports} }};\n}})();\n"

    for entry in entries:
        join(entry)
    return '"use strict";\n' + "".join(joined.values())


@cache
def join_styles() -> str:
    return "".join(_read_file(name) for name in STYLES)


def build_policy(*, scripts: str, styles: str) -> str:
    """Return a content security policy that allows this script, this style and embedded pictures."""
    allowed = f"script-src {_hash_text(scripts)}; style-src {_hash_text(styles)}; img-src data: blob:"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def _read_file(name: str) -> str:
    return files("attnlab.report").joinpath("viewer", name).read_text(encoding="utf-8")


def _name_module(name: str) -> str:
    return name.replace(".", "_").replace("-", "_")


def _hash_text(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
