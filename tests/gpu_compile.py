"""Compile kernels for a GPU that is not here: the interpreter accepts products that no compiler does."""

import json
import os
import subprocess
import sys
from functools import cache

import pytest

some_and_all = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
SERVER = """
import json, os, re, subprocess, sys, tempfile, traceback
import torch, triton

def count_stack_bytes(made):
    "The bytes of memory where a thread of a compiled kernel keeps what its registers do not hold."
    reader = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        words = [reader, "--dump-resource-usage", file.name]
        told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\\d+)", told).group(1))

for line in sys.stdin:
    try:
        given = {"__name__": "kernels", "count_stack_bytes": count_stack_bytes}
        exec(compile(json.loads(line), "<kernels>", "exec"), given)
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
