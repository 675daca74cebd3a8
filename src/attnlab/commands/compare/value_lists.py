"""Lists of values on the command line: commas separate, except inside parentheses or double quotes.

lr=5e-4,1e-3                     two values: a grid
betas=(0.9,0.98)                 one value, a pair
betas=(0.9,0.98),(0.9,0.999)     two pairs
data='"my, own.txt"'             one value with a comma; the double quotes are removed
attention=coda,dagpam(initial=0.5,fixed=true)      the second attention has its own options
"""

from attnlab.config import split_pairs


def split_list(text: str, key: str) -> list[str]:
    """Return the values of key=text, one or more; ValueError for an unbalanced, empty or repeated value."""
    parts, depth, quoted = [""], 0, False
    for character in text:
        if character == '"':
            quoted = not quoted
            continue
        if not quoted:
            depth += {"(": 1, ")": -1}.get(character, 0)
            if depth < 0:
                break
            if character == "," and depth == 0:
                parts.append("")
                continue
        parts[-1] += character
    if quoted or depth:
        raise ValueError(f"{key}={text}: unbalanced {'double quote' if quoted else 'parenthesis'}")
    if len(parts) > 1 and not all(part.strip() for part in parts):
        raise ValueError(f"{key}={text}: a value between commas is empty; remove the extra comma")
    if twice := next((part for part in parts if parts.count(part) > 1), None):
        raise ValueError(f"{key}={text}: {twice} is given twice")
    return parts


def split_options(text: str) -> tuple[str, dict[str, str]]:
    """'dagpam(initial=0.5,fixed=true)' -> ('dagpam', {'initial': '0.5', 'fixed': 'true'})."""
    name, bracket, rest = text.partition("(")
    if not bracket:
        return text, {}
    if not rest.endswith(")") or not name:
        raise ValueError(f"attention={text}: write options as NAME(key=value,key=value)")
    return name, split_pairs(split_list(rest[:-1], name))
