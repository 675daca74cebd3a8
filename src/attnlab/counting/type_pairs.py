"""An exact index of the pairs of types that occur together: (source type, target type) -> a number from 1.

Open addressing in numpy arrays. Many pairs are probed together, and only those that met another pair's slot are probed
again. Numbers stay the same when the table grows. Memory: 8 bytes for each pair, up to 16 while they are added, and 6
to 12 for its slots until `drop_slots`.
"""

import numpy as np

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd
SMALLEST = 2**12  # number of slots of an empty table
FULLEST = 0.7  # share of used slots at which the table doubles
PROBED = 2**17  # pairs that are probed together
FREE = 0  # a slot without a number
NO_KEY = -1


class TypePairs:
    """Numbers for pairs of types. Number 0 stands for no pair."""

    def __init__(self, columns: int) -> None:
        self.columns = max(columns, 1)  # number of target types
        self._keys = np.full(SMALLEST, NO_KEY, dtype=np.int64)  # by number: source · columns + target; then unused room
        self._size = 1
        self._slots = np.full(SMALLEST, FREE, dtype=np.int32)  # the number in each slot

    def __len__(self) -> int:
        """Return the number of pairs, and one for number 0."""
        return self._size

    @property
    def keys(self) -> np.ndarray:
        """source · columns + target of each number, −1 for number 0."""
        return self._keys[: self._size]

    def add(self, keys: np.ndarray) -> np.ndarray:
        """Return the numbers of these pairs (n,), int32; new ones get the next numbers."""
        return self._probe_parts(keys, insert=True)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return the numbers of these pairs (n,), int32; 0 for a pair that was never added."""
        return self._probe_parts(keys, insert=False)

    def drop_slots(self) -> None:
        """Free the memory of the index. Only `keys` and `len` work afterwards."""
        self._slots = np.zeros(0, dtype=np.int32)
        self._keys = self.keys.copy()

    def _probe_parts(self, keys: np.ndarray, *, insert: bool) -> np.ndarray:
        found = np.zeros(len(keys), dtype=np.int32)
        for start in range(0, len(keys), PROBED):
            part = keys[start : start + PROBED]
            if insert:
                self._make_room(len(part))
            self._probe(part, found[start : start + PROBED], insert=insert)
        return found

    def _probe(self, keys: np.ndarray, found: np.ndarray, *, insert: bool) -> None:
        places = _hash(keys, len(self._slots))
        asked: np.ndarray | slice = slice(None)  # where the results of the remaining keys go
        while len(keys):
            numbers = self._slots[places]
            if insert and len(free := np.flatnonzero(numbers == FREE)):
                self._occupy(places[free], keys[free])
                numbers[free] = self._slots[places[free]]
            missed = self._keys[numbers] != keys
            found[asked] = np.where(missed, 0, numbers)
            again = np.flatnonzero(missed & (insert | (numbers != FREE)))
            asked = again if isinstance(asked, slice) else asked[again]
            keys, places = keys[again], (places[again] + 1) % len(self._slots)

    def _occupy(self, places: np.ndarray, keys: np.ndarray) -> None:
        """Give free slots, which may be repeated, to new pairs: the last of those that want one slot gets it."""
        order = np.arange(1, len(places) + 1, dtype=np.int32)
        self._slots[places] = order
        winners = self._slots[places] == order
        end = self._size + int(winners.sum())
        if end > len(self._keys):
            wider = np.empty(max(2 * len(self._keys), end), dtype=np.int64)  # unused room takes no memory
            wider[: self._size] = self.keys
            self._keys = wider
        self._keys[self._size : end] = keys[winners]
        self._slots[places[winners]] = np.arange(self._size, end, dtype=np.int32)
        self._size = end

    def _make_room(self, more: int) -> None:
        needed, slots = self._size + more, len(self._slots)
        while needed > FULLEST * slots:
            slots *= 2
        if slots == len(self._slots):
            return
        self._slots = np.zeros(0, dtype=np.int32)  # frees the old slots first: the keys suffice
        self._slots = np.full(slots, FREE, dtype=np.int32)
        for start in range(1, self._size, PROBED):
            numbers = np.arange(start, min(start + PROBED, self._size), dtype=np.int32)
            places = _hash(self._keys[numbers], slots)
            while len(numbers):
                free = self._slots[places] == FREE
                self._slots[places[free]] = numbers[free]
                lost = self._slots[places] != numbers
                numbers, places = numbers[lost], (places[lost] + 1) % slots


def _hash(keys: np.ndarray, slots: int) -> np.ndarray:
    """Return a slot of each key: the highest bits of a product (Knuth's multiplicative hashing)."""
    shift = np.uint64(64 - (slots.bit_length() - 1))
    return ((keys.astype(np.uint64) * MULTIPLIER) >> shift).astype(np.int64)
