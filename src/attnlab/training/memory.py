"""Too little memory, said in one line."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def explain_memory(advise: Callable[[], str]) -> Iterator[None]:
    """Turn torch's error of too little memory into a ValueError, "not enough memory" and what `advise` returns."""
    try:
        yield
    except RuntimeError as error:
        if not re.search("tried to allocate|Storage size calculation overflowed", str(error), re.IGNORECASE):
            raise
        raise ValueError(f"not enough memory{advise()}") from error
