"""The page's scripts and styles: the plain modules in viewer/, joined so that one file holds them all.

A module says what it takes from others in lines `import { a, b } from "./other.js";` and marks what it gives with
`export`, at the start of a line. Joined, each becomes a function that is called once and returns what it gives:

    const other_js = (() => { … return { a, b }; })();

so a browser needs no build and no network, and names of one module stay its own. The page's policy allows this script
and this style, by their hashes, and nothing else: what comes from data cannot run.
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
    """These modules, and all that they import, each once and after what it needs."""
    joined: dict[str, str] = {}

    def join(name: str, above: tuple[str, ...] = ()) -> None:
        if name in above:
            raise ValueError(f"{name} imports itself by way of {' → '.join(above)}")
        if name in joined:
            return
        text = _read_file(name)
        for _, other in IMPORT.findall(text):
            join(other, (*above, name))
        given = ", ".join(found for _, found in EXPORT.findall(text))
        body = IMPORT.sub(lambda m: f"const {{{m[1]}}} = {_name_module(m[2])};", EXPORT.sub(r"\1", text))
        joined[name] = f"const {_name_module(name)} = (() => {{\n{body}return {{ {given} }};\n}})();\n"

    for entry in entries:
        join(entry)
    return '"use strict";\n' + "".join(joined.values())


@cache
def join_styles() -> str:
    return "".join(_read_file(name) for name in STYLES)


def build_policy(*, scripts: str, styles: str) -> str:
    """What the page may do: run this script, have this style, show pictures that it holds itself."""
    rules = {
        "default-src": "'none'",
        "script-src": _hash_text(scripts),
        "style-src": _hash_text(styles),
        "img-src": "data: blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{what} {where}" for what, where in rules.items())


def _read_file(name: str) -> str:
    return files("attnlab.report").joinpath("viewer", name).read_text(encoding="utf-8")


def _name_module(name: str) -> str:
    return name.replace(".", "_").replace("-", "_")


def _hash_text(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
