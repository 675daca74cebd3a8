"""A job, and what a scheduler promises of it."""

import os
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, ClassVar

RETRIES = 3  # of a job whose process or machine died
POLL_S = 0.5  # between two looks at the jobs


@dataclass(frozen=True)
class Job:
    """function(*arguments), which another process can import and which, called again, goes on where it stood."""

    name: str  # of its own
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    after: tuple[str, ...] = ()  # names of jobs that must be done before


class Scheduler(AbstractContextManager["Scheduler"], ABC):
    """Runs jobs, each in a process of its own and in this process's working folder."""

    device: str  # cpu or cuda: where they compute
    here: ClassVar[bool]  # whether all of them run on this machine

    @abstractmethod
    def run(
        self, jobs: Sequence[Job], *, alone: bool = False, watch: Callable[[], None] = lambda: None
    ) -> dict[str, str]:
        """Run them all, of those that can be started the first; the reason of each that failed, by name.

        alone   one after another, so that a clock can be trusted
        watch   called now and then while they run

        On KeyboardInterrupt every job is asked once to stop, is waited for, and the exception goes on.
        """

    def __exit__(self, *exception: object) -> None:
        """Nothing to give back."""


class Waiting:
    """Jobs that are to be started, in the order given but for those that come after others. One that comes after a job
    that failed fails too.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        names = [job.name for job in jobs]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two jobs are called {min(twice)!r}: each needs a name of its own")
        for job in jobs:
            if unknown := set(job.after).difference(names):
                raise ValueError(f"the job {job.name!r} comes after {min(unknown)!r}, which is none of the jobs")
        try:
            TopologicalSorter({job.name: job.after for job in jobs}).prepare()
        except CycleError as error:
            raise ValueError(f"these jobs wait for each other: {', '.join(error.args[1])}") from None
        self.left = list(jobs)
        self.open = set(names)  # not done yet
        self.failed: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.left)

    def take(self) -> Job | None:
        """The first that can be started; None where all that are left come after one that is not done."""
        ready = next((job for job in self.left if self.open.isdisjoint(job.after)), None)
        if ready is not None:
            self.left.remove(ready)
        return ready

    def again(self, job: Job) -> None:
        """It is to be started once more."""
        self.left.append(job)

    def ended(self, job: Job, reason: str) -> None:
        """It is done or, for a reason, failed."""
        self.open.discard(job.name)
        if not reason:
            return
        self.failed[job.name] = reason
        while after := next((other for other in self.left if job.name in other.after), None):
            self.left.remove(after)
            self.ended(after, f"it comes after {job.name}, which failed")


def attempt(job: Job, folder: str) -> str:
    """Do the job in a working folder: why it failed, empty where it did not. KeyboardInterrupt goes through."""
    if not Path(folder).is_dir():
        return f"{folder} is not there: all machines must see the working folder and the run folders under one path"
    os.chdir(folder)
    try:
        job.function(*job.arguments)
    except Exception as error:
        if os.environ.get("ATTNLAB_TRACE"):
            traceback.print_exc()
        return told(error)
    return ""


def told(error: Exception) -> str:
    """What went wrong as one line; of an error that says what to do the message alone."""
    message = " ".join(str(error).split())
    return message if isinstance(error, ValueError | OSError) and message else f"{type(error).__name__}: {message}"
