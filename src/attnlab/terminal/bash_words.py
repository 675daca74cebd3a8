"""Completion in bash, which splits words at "=": attention=so arrives as three words."""

import os


def join_bash_words() -> None:
    """Join the words of COMP_WORDS that bash split at "=", if bash asks for completions.

    The word being completed stays apart from its key: bash replaces only what follows the "=". The key becomes the
    word before it, as `attention=` or `--attention`.
    """
    if os.environ.get("_ATTNLAB_COMPLETE") != "complete_bash":
        return
    words, current = os.environ["COMP_WORDS"].split("\n"), int(os.environ["COMP_CWORD"])
    word = "".join(words[current : current + 1])
    joined: list[str] = []
    for each in words[:current] + ["="] * (word == "="):
        if joined and (each == "=" or joined[-1].endswith("=")):
            joined[-1] += each
        else:
            joined.append(each)
    if joined[-1].startswith("--"):
        joined[-1] = joined[-1].removesuffix("=")
    os.environ["COMP_WORDS"] = "\n".join([*joined, "" if word == "=" else word])
    os.environ["COMP_CWORD"] = str(len(joined))
