"""What kernels read and write in Triton's interpreter, which has no bounds and runs one program after another."""

from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, interpreter_builder

NOBODY, SEVERAL = -1, -2  # instead of the number of a program


class Launch:
    """The memory of the arguments of one launch: which program has read and written each byte."""

    def __init__(self, name, arguments):
        self.name = name
        tensors = [x for x in arguments if isinstance(x, torch.Tensor) and x.numel()]
        spans = sorted((x.data_ptr(), x.data_ptr() + _measure_span(x)) for x in tensors)
        self.starts, ends = np.array(spans, dtype=np.int64).T
        self.ends = np.maximum.accumulate(ends)  # one tensor may be two arguments
        sizes = self.ends - np.maximum(self.starts, np.roll(self.ends, 1) * (np.arange(len(spans)) > 0))
        self.shifts = np.cumsum(sizes) - self.ends  # from an address to its place
        self.reader, self.writer = (np.full(sizes.sum(), NOBODY, dtype=np.int32) for _ in range(2))

    def find(self, pointers, mask, deed):
        """Return the places of an access that is not masked."""
        addresses = pointers[np.broadcast_to(mask, pointers.shape)].astype(np.int64)
        number = np.searchsorted(self.starts, addresses, "right") - 1
        self.refuse((number < 0) | (addresses >= self.ends[number]), f"{deed} outside its arguments")
        return addresses + self.shifts[number]

    def read(self, pointers, mask):
        places, own = self.find(pointers, mask, "reads"), _number_program()
        self.refuse(~np.isin(self.writer[places], (NOBODY, own)), "reads what another program writes")
        self.reader[places] = np.where(np.isin(self.reader[places], (NOBODY, own)), own, SEVERAL)

    def write(self, pointers, mask):
        places, own = self.find(pointers, mask, "writes"), _number_program()
        for others, deed in ((self.writer, "writes"), (self.reader, "reads")):
            self.refuse(~np.isin(others[places], (NOBODY, own)), f"writes what another program {deed}")
        self.writer[places] = own

    def refuse(self, wrong, problem):
        assert not wrong.any(), f"{self.name} {problem}"


def _measure_span(x):
    """The number of bytes from the first to the last number of a tensor."""
    return (sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True)) + 1) * x.element_size()


def _number_program():
    number = 0
    for place, size in zip(interpreter_builder.grid_idx, interpreter_builder.grid_dim, strict=True):
        number = number * size + place
    return number


@contextmanager
def check_accesses():
    """Let kernels fail that leave the memory of their arguments, or whose programs meet in it. Yield their names."""
    launches, names = [], set()
    load, store, execute = (
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
        GridExecutor.__call__,
    )

    def checked_load(builder, pointers, mask, *rest, **named):
        launches[-1].read(pointers.data, mask.data)
        return load(builder, pointers, mask, *rest, **named)

    def checked_store(builder, pointers, value, mask, *rest, **named):
        launches[-1].write(pointers.data, mask.data)
        return store(builder, pointers, value, mask, *rest, **named)

    def checked_call(kernel, *arguments, **named):
        names.add(kernel.fn.__name__)
        launches.append(Launch(f"{kernel.fn.__module__}.{kernel.fn.__name__}", arguments))
        try:
            return execute(kernel, *arguments, **named)
        finally:
            launches.pop()

    with (
        patch.object(InterpreterBuilder, "create_masked_load", checked_load),
        patch.object(InterpreterBuilder, "create_masked_store", checked_store),
        patch.object(GridExecutor, "__call__", checked_call),
    ):
        yield names
