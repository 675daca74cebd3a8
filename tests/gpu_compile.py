"""Compile kernels for a GPU that is not here: the interpreter accepts products that no compiler does."""

import os
import subprocess
import sys

import pytest

some_and_all = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])


def assert_compiles(code, every=True):
    """Run code that compiles kernels and then prints "compiled", in a process without the interpreter.

    A compilation takes a second or more: the code compiles every type and size only where EVERY is true.
    """
    code = f"EVERY = {every}\n{code}"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "compiled", done.stderr[-2000:]
