"""How `attnlab compare` reads a value: commas separate, but not inside parentheses or double quotes.

lr=5e-4,1e-3                     two values: a grid
betas=(0.9,0.98)                 one value, a pair
betas=(0.9,0.98),(0.9,0.999)     two of them
data='"my, own.txt"'             one value with a comma in it; the double quotes are taken off
attention=coda,dagpam(initial=0.5,fixed=true)      an attention with options of its own
"""

from attnlab.config import split_pairs


def split_list(text: str, key: str) -> list[str]:
    """The values of a list, one or more."""
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
        raise ValueError(f"{key}={text}: a {'double quote' if quoted else 'parenthesis'} has no other to go with")
    if len(parts) > 1 and not all(part.strip() for part in parts):
        raise ValueError(f"{key}={text}: there is nothing between two commas; say each value once, without spaces")
    if twice := next((part for part in parts if parts.count(part) > 1), None):
        raise ValueError(f"{key}={text}: {twice} is there twice")
    return parts


def split_options(text: str) -> tuple[str, dict[str, str]]:
    """'dagpam(initial=0.5,fixed=true)' -> ('dagpam', {'initial': '0.5', 'fixed': 'true'})."""
    name, bracket, rest = text.partition("(")
    if not bracket:
        return text, {}
    if not rest.endswith(")") or not name:
        raise ValueError(f"attention={text}: options are written NAME(key=value,key=value)")
    return name, split_pairs(split_list(rest[:-1], name))
