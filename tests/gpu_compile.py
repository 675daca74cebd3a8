"""Compile kernels for a GPU that is not here: the interpreter accepts products that no compiler does."""

import json
import os
import subprocess
import sys
from functools import cache

import pytest

some_and_all = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
SERVER = """
import json, sys, traceback
import torch, triton
for line in sys.stdin:
    try:
        exec(compile(json.loads(line), "<kernels>", "exec"), {"__name__": "kernels"})
        error = ""
    except Exception:
        error = traceback.format_exc()
    print(json.dumps(error), file=sys.__stdout__, flush=True)
"""


@cache
def start_server():
    """Start a process without the interpreter that compiles what it is sent; it ends with this process."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", SERVER], env=environment, text=True, **pipes)


def assert_compiles(code, every=True):
    """Run code that compiles kernels, in a process without the interpreter.

    A compilation takes a second or more: the code compiles every type and size only where EVERY is true.
    """
    server = start_server()
    server.stdin.write(json.dumps(f"EVERY = {every}\n{code}") + "\n")
    server.stdin.flush()
    error = json.loads(server.stdout.readline())
    assert not error, error[-2000:]
