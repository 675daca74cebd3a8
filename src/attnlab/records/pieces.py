"""How tokens are shown: the pieces of any tokenizer as readable text, in one notation.

    ▁cat         a space, then cat: byte-level tokenizers, which write Ġcat, and SentencePiece
    ##s          continues the word before it: WordPiece, and tokenizers that write cat@@ s or s</w>
    東⟨1/2⟩       the first of the two tokens that share the bytes of one character
    ⟨E6 9D⟩      bytes that are no character, for example where a text is cut off
    ⏎ ⇥          a line break, a tab
    ◌ि            a mark that is written with the letter before it, in another token
    ⟨U+200D⟩     another character that cannot be seen by itself

A Record stores this notation in `words` and the ids in `tokens`; every table, figure and page shows it as it is.
"""

import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby

SPACE = "▁"  # a space, at the beginning of a word
BEGINS = (SPACE, "Ġ")  # prefix of the first piece of a word: SentencePiece, byte-level BPE
CONTINUES = "##"  # prefix of the other pieces: WordPiece
ENDS = "</w>"  # suffix of the last piece: BPE
UNFINISHED = "@@"  # suffix of all pieces but the last: subword-nmt
BREAKS = {"\n": "⏎", "\t": "⇥"}
PART = re.compile(r"(⟨U\+[0-9A-F]+⟩|◌?.)⟨(\d+)/\d+⟩")  # a character that several tokens share, and which one this is
CODE = re.compile(r"⟨U\+([0-9A-F]+)⟩")
CIRCLE = "◌"  # carries a mark that begins a token
JOINERS = re.compile("[\u200c\u200d\ufe00-\ufe0f]")  # cannot be seen, but belong inside words and emoji
ADJACENT_BYTES = re.compile(r"(?:⟨[0-9A-F]{2}⟩){2,}")
SINGLE_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte for which SentencePiece has no piece

_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # bytes that stand for themselves
_HIDDEN = [byte for byte in range(256) if byte not in set(_VISIBLE)]
BYTE_OF_LETTER = {chr(byte): byte for byte in _VISIBLE} | {chr(256 + n): byte for n, byte in enumerate(_HIDDEN)}


def show_pieces(pieces: Sequence[str], *, byte_level: bool = False, plain: Collection[str] = ()) -> list[str]:
    """Show the pieces of one text.

    byte_level   the tokenizer writes bytes as letters, as GPT-2's does: Ã¤ for ä
    plain        pieces that are text in any case, such as special tokens
    """
    mark = _find_suffix(pieces, byte_level)
    parts: list[str | bytes] = []
    continuing: list[bool] = []
    for n, piece in enumerate(pieces):
        before = pieces[n - 1] if n else ""
        joined = n > 0 and before not in plain and before.endswith(mark) == (mark == UNFINISHED)
        continuing.append(bool(mark) and joined and piece not in plain)
        text = piece if piece in plain or not mark else piece.removesuffix(mark)
        if byte_level and piece not in plain and all(letter in BYTE_OF_LETTER for letter in text):
            parts.append(bytes(BYTE_OF_LETTER[letter] for letter in text))
        elif match := SINGLE_BYTE.fullmatch(text):
            parts.append(bytes.fromhex(match[1]))
        else:
            parts.append(text)
    return [CONTINUES * joined + text for joined, text in zip(continuing, show_parts(parts), strict=True)]


def show_parts(parts: Sequence[str | bytes]) -> list[str]:
    """Show the parts of one text. A character whose bytes are in several parts is shown in each of them."""
    texts = ["" if isinstance(part, bytes) else _show_text(part) for part in parts]
    for is_raw, numbers in groupby(range(len(parts)), key=lambda n: isinstance(parts[n], bytes)):
        if is_raw:
            _add_bytes(texts, {n: parts[n] for n in numbers})  # type: ignore[misc]
    return [ADJACENT_BYTES.sub(lambda run: run[0].replace("⟩⟨", " "), text) for text in texts]


def join_shown(pieces: Iterable[str]) -> str:
    """Join the shown pieces of one word: characters that several tokens share, and marks, become whole again."""
    text = PART.sub(lambda part: part[1] if part[2] == "1" else "", "".join(pieces))
    text = "".join(c for n, c in enumerate(text) if c != CIRCLE or n == 0 or not _is_mark(text[n + 1 : n + 2] or c))
    return text[:1] + CODE.sub(lambda code: c if JOINERS.match(c := chr(int(code[1], 16))) else code[0], text[1:])


def _add_bytes(texts: list[str], run: Mapping[int, bytes]) -> None:
    """Decode consecutive parts of bytes together, and add each character to the texts of its parts."""
    owners = [n for n, part in run.items() for _ in part]
    place = 0
    for character in b"".join(run.values()).decode("utf-8", errors="surrogateescape"):
        raw = character.encode("utf-8", errors="surrogateescape")
        sharing = sorted(set(owners[place : place + len(raw)]))
        is_first = not texts[sharing[0]].strip(SPACE)
        shown = f"⟨{raw.hex().upper()}⟩" if "\udc80" <= character <= "\udcff" else _show_character(character, is_first)
        for number, owner in enumerate(sharing, start=1):
            texts[owner] += shown if len(sharing) == 1 else f"{shown}⟨{number}/{len(sharing)}⟩"
        place += len(raw)


def _show_text(piece: str) -> str:
    return "".join(c if c == SPACE else _show_character(c, not piece[:n].strip(SPACE)) for n, c in enumerate(piece))


def _show_character(character: str, is_first: bool) -> str:
    """Show a character; is_first: no other character of its token is before it."""
    if character == " ":
        return SPACE
    if character in BREAKS:
        return BREAKS[character]
    if character == SPACE or (is_first if JOINERS.match(character) else not character.isprintable()):
        return f"⟨U+{ord(character):04X}⟩"
    return CIRCLE * (is_first and _is_mark(character)) + character


def _is_mark(character: str) -> bool:
    return unicodedata.category(character).startswith("M")


def _find_suffix(pieces: Sequence[str], byte_level: bool) -> str:
    """Return the suffix by which the pieces mark the ends of words, or ""."""
    if any(piece.endswith(ENDS) and piece != ENDS for piece in pieces):
        return ENDS
    if byte_level or any(piece.startswith((*BEGINS, CONTINUES)) for piece in pieces):
        return ""
    return UNFINISHED if any(piece.endswith(UNFINISHED) and piece != UNFINISHED for piece in pieces) else ""
