"""State of the models that are running, apart for each thread, which torch.compile can trace.

A ContextVar breaks the graphs of torch.compile. Nothing here imports transformers.
"""

import threading
from typing import Generic, TypeVar

State = TypeVar("State")


def find_thread() -> int:
    """Return the number of this thread. A compiled program has that of the thread that traced it."""
    return threading.get_ident()


# like torch.compiler.assume_constant_result, without importing the compiler, which takes a second or more
find_thread._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Running(Generic[State]):
    """A value that each thread sets for itself; None before.

    A compiled model sets and clears it within one program, so threads may share the program. Programs of single layers
    read what their model set; they are for the thread that traced them.
    """

    def __init__(self) -> None:
        self.values: dict[int, State] = {}

    def get(self) -> State | None:
        return self.values.get(find_thread())

    def keep(self, value: State | None) -> None:
        if value is None:
            self.values.pop(find_thread(), None)
        else:
            self.values[find_thread()] = value
