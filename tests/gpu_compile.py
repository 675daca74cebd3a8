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

def end_at_llvm(backend=None, stages=None, *more):
    if stages is None:
        return "ends at LLVM", ""  # Triton keeps what it compiles, and adds this to the key
    stages["ptx"] = lambda module, metadata: metadata.update(name="kernel") or ""
    stages["cubin"] = lambda module, metadata: b""

for line in sys.stdin:
    code, every, whole = json.loads(line)
    triton.knobs.runtime.add_stages_inspection_hook = None if whole else end_at_llvm
    os.environ["DISABLE_LLVM_OPT"] = "0" if whole else "1"
    try:
        given = {"__name__": "kernels", "EVERY": every, "count_stack_bytes": count_stack_bytes}
        exec(compile(code, "<kernels>", "exec"), given)
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


def assert_compiles(code, every=True, *, whole=False):
    """Run code that compiles kernels, in a process without the interpreter.

    A compilation takes a second or more. Unless EVERY is true, the code compiles fewer types and sizes, and, unless
    the whole is asked for, only to LLVM's code: what the interpreter accepts and Triton refuses is refused before.
    Then LLVM optimises, which takes most of the time, and ptxas assembles.
    """
    server = start_server()
    server.stdin.write(json.dumps([code, every, every or whole]) + "\n")
    server.stdin.flush()
    error = json.loads(server.stdout.readline())
    assert not error, error[-2000:]
