"""Compile kernels for a GPU that is not here: the interpreter accepts products that no compiler does."""

import os
import subprocess
import sys


def assert_compiles(code):
    """Run code that compiles kernels and then prints "compiled", in a process without the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "compiled", done.stderr[-2000:]
