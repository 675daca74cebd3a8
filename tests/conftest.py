import os
import signal

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU; read when triton is first imported

import pytest
from chromium import chromium, opened  # noqa: F401 (fixtures)

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # where it was ignored, programs started here would ignore it


def pytest_collection_modifyitems(items):
    """A test that needs a GPU is skipped, with its reason, where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
