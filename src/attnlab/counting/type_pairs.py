"""An exact index of the pairs of types that occur together: (source type, target type) -> a number from 1.

Open addressing in numpy arrays. All pairs of a call are probed together, and only those that met another pair's slot
are probed again. Numbers stay the same when the table grows. Memory: 8 bytes for each pair, and 17 to 34 for its slots
until `drop_slots`.
"""

import numpy as np

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd
SMALLEST = 2**12  # number of slots of an empty table
FULLEST = 0.7  # share of used slots at which the table doubles
FREE = -1


class TypePairs:
    """Numbers for pairs of types, by order of first occurrence. Number 0 stands for no pair."""

    def __init__(self, columns: int) -> None:
        self.columns = max(columns, 1)  # number of target types
        self._keys = np.full(SMALLEST, FREE, dtype=np.int64)  # by number: source · columns + target
        self._size = 1
        self._allocate(SMALLEST)

    def __len__(self) -> int:
        """Return the number of pairs, and one for number 0."""
        return self._size

    @property
    def keys(self) -> np.ndarray:
        """source · columns + target of each number, −1 for number 0."""
        return self._keys[: self._size]

    def add(self, keys: np.ndarray) -> np.ndarray:
        """Return the numbers of these pairs (n,), int32; new ones get the next numbers."""
        while self._size + len(keys) > FULLEST * len(self._slots) and len(self._slots) < 4 * (self._size + len(keys)):
            self._grow()
        return self._probe(keys, insert=True)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return the numbers of these pairs (n,), int32; 0 for a pair that was never added."""
        return self._probe(keys, insert=False)

    def drop_slots(self) -> None:
        """Free the memory of the index. Only `keys` and `len` work afterwards."""
        self._slots = self._numbers = np.zeros(0, dtype=np.int64)

    def _allocate(self, slots: int) -> None:
        self._slots = np.full(slots, FREE, dtype=np.int64)  # the key in each slot
        self._numbers = np.zeros(slots, dtype=np.int32)

    def _grow(self) -> None:
        known = self.keys[1:].copy()
        self._allocate(2 * len(self._slots))
        self._size = 1
        self._probe(known, insert=True, in_order=True)

    def _probe(self, keys: np.ndarray, *, insert: bool, in_order: bool = False) -> np.ndarray:
        found = np.zeros(len(keys), dtype=np.int32)
        places = _hash(keys, len(self._slots))
        asked: np.ndarray | slice = slice(None)  # where the results of the remaining keys go
        while len(keys):
            held = self._slots[places]
            free = np.flatnonzero(held == FREE)
            if insert and len(free):
                self._slots[places[free]] = keys[free]
                held = self._slots[places]
                self._number_slots(places[free][held[free] == keys[free]], in_order)
            found[asked] = np.where(held == keys, self._numbers[places], 0)
            again = np.flatnonzero((held != keys) & (insert | (held != FREE)))
            asked = again if isinstance(asked, slice) else asked[again]
            keys, places = keys[again], (places[again] + 1) % len(self._slots)
        if in_order:
            self._renumber(found)
        return found

    def _number_slots(self, slots: np.ndarray, in_order: bool) -> None:
        """Give the next numbers to newly used slots, which may be repeated: the last of equal ones counts."""
        order = np.arange(len(slots), dtype=np.int32)
        self._numbers[slots] = order
        fresh = slots[self._numbers[slots] == order]
        end = self._size + len(fresh)
        if end > len(self._keys):
            self._keys = np.concatenate([self._keys, np.full(max(len(self._keys), len(fresh)), FREE, dtype=np.int64)])
        self._numbers[fresh] = np.arange(self._size, end)
        if not in_order:
            self._keys[self._size : end] = self._slots[fresh]
        self._size = end

    def _renumber(self, found: np.ndarray) -> None:
        """After growing, give the pairs their old numbers: pair k of `keys` is number k + 1."""
        used = np.flatnonzero(self._slots != FREE)
        old = np.empty(len(found) + 1, dtype=np.int32)
        old[found] = np.arange(1, len(found) + 1)
        self._numbers[used] = old[self._numbers[used]]


def _hash(keys: np.ndarray, slots: int) -> np.ndarray:
    """Return a slot of each key: the highest bits of a product (Knuth's multiplicative hashing)."""
    shift = np.uint64(64 - (slots.bit_length() - 1))
    return ((keys.astype(np.uint64) * MULTIPLIER) >> shift).astype(np.int64)
