"""The processes that train one model: this one alone, or all that a launcher started, through Accelerate.

Importing Accelerate takes a large part of a second, so a single process without a tracker does without it.
"""

import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # set by torchrun and by MPI


def count_processes() -> int:
    """Return the number of processes that torchrun, accelerate launch or mpirun started together."""
    return max(int(os.environ.get(name) or 1) for name in SIZES)


class SingleProcess:
    """A single process, with those attributes of accelerate.Accelerator that one process needs."""

    num_processes, process_index, is_main_process = 1, 0, True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a context in which the other processes wait: there are none."""
        return nullcontext()

    def reduce(self, values: Tensor) -> Tensor:
        """Return the sum over all processes."""
        return values
