"""The command line in two processes that work together, as torchrun starts them, but forked: imports take seconds."""

import os
import socket
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from attnlab.cli import main
from attnlab.experiments.jobs import Job
from attnlab.experiments.local import Local


@dataclass
class Ended:
    """What a process left behind."""

    returncode: int
    output: str


def run_pair(folder, *words, prepare=None, watch=lambda pids: None):
    """Run `attnlab WORDS…` in two processes and return how each ended.

    prepare   called in each process first
    watch     called with the process ids while they run
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    files = [Path(folder) / f"rank-{rank}.pid" for rank in (0, 1)]
    jobs = [Job(f"rank {k}", _work, (k, port, [*map(str, words)], file, prepare)) for k, file in enumerate(files)]

    def tell():
        if all(file.exists() for file in files):
            watch([int(file.read_text()) for file in files])

    with Local(2, "cpu") as on:
        failed = on.run(jobs, watch=tell)
    assert not failed, failed
    return [Ended(int(file.with_suffix(".code").read_text()), file.with_suffix(".txt").read_text()) for file in files]


def _work(rank, port, words, file, prepare):
    about = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    about |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in about.items()})
    sys.argv = ["attnlab", *words]
    if prepare is not None:
        prepare()
    with open(file.with_suffix(".txt"), "w") as out, redirect_stdout(out), redirect_stderr(out):
        temporary = file.with_suffix(".part")
        temporary.write_text(str(os.getpid()))
        temporary.rename(file)
        try:
            main()
        except SystemExit as ended:
            file.with_suffix(".code").write_text(str(ended.code or 0))
