"""The command line in this process: to start another takes seconds, for imports."""

import io
import os
import subprocess
import sys
import warnings
from contextlib import chdir, redirect_stderr, redirect_stdout
from unittest import mock

import pytest

from attnlab.cli import main


def run_attnlab(*words, input="", cwd="."):
    """Run `attnlab WORDS…`, and return what a process would have: returncode, stdout and stderr."""
    streams = [io.TextIOWrapper(io.BytesIO(text.encode()), write_through=True) for text in (input, "", "")]
    stdin, stdout, stderr = streams
    with (
        chdir(cwd),
        mock.patch.object(sys, "argv", ["attnlab", *map(str, words)]),
        mock.patch.object(sys, "stdin", stdin),
        mock.patch.dict(os.environ),
        redirect_stdout(stdout),
        redirect_stderr(stderr),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("always", UserWarning)  # as in a process: shown, not raised
        with pytest.raises(SystemExit) as ended:
            main()
    return subprocess.CompletedProcess(
        words, ended.value.code or 0, *(s.buffer.getvalue().decode() for s in (stdout, stderr))
    )
