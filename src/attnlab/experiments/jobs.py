"""Jobs, and what a scheduler does with them."""

import os
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, ClassVar

from attnlab.config import describe_error
from attnlab.experiments.deadline import LEAST_S, Deadline, OutOfTimeError
from attnlab.registry import own_files

RETRIES = 3  # of a job whose process or machine died
POLL_S = 0.5  # between two looks at the jobs


@dataclass(frozen=True)
class Job:
    """A call that another process can import and make. Called again, it resumes."""

    name: str  # unique among the jobs of one call
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    after: tuple[str, ...] = ()  # names of the jobs that must be done before
    least_s: float = LEAST_S  # with less time before the deadline it is not started


class Scheduler(AbstractContextManager["Scheduler"], ABC):
    """Runs jobs, each in its own process and in this process's working folder."""

    device: str  # cpu or cuda: where jobs compute
    here: ClassVar[bool]  # whether all jobs run on this machine

    @abstractmethod
    def run(
        self,
        jobs: Sequence[Job],
        *,
        alone: bool = False,
        watch: Callable[[], None] = lambda: None,
        until: Deadline | None = None,
    ) -> dict[str, str]:
        """Run all jobs and return the reason of each that failed, by name.

        alone   one after another, so that timings can be trusted
        watch   called regularly while jobs run
        until   near this time running jobs stop at a checkpoint, and OutOfTimeError is raised

        On KeyboardInterrupt every job is asked to stop and is waited for; then the exception is raised again.
        """

    def __exit__(self, *exception: object) -> None:
        """Release nothing by default."""


class JobQueue:
    """Jobs that wait for their start, in the order given; a job after a failed job fails too."""

    def __init__(self, jobs: Sequence[Job], until: Deadline | None = None) -> None:
        names = [job.name for job in jobs]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two jobs are named {min(twice)!r}: names must be unique")
        for job in jobs:
            if unknown := set(job.after).difference(names):
                raise ValueError(f"the job {job.name!r} must come after {min(unknown)!r}, which is not among the jobs")
        try:
            TopologicalSorter({job.name: job.after for job in jobs}).prepare()
        except CycleError as error:
            raise ValueError(f"these jobs wait for each other: {', '.join(error.args[1])}") from None
        self.left = list(jobs)
        self.until = until
        self.open = set(names)  # not done yet
        self.failed: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.left)

    def take(self) -> Job | None:
        """Remove and return the first job that can start; None if all wait for others or for more time."""
        for job in self.left:
            if self.open.isdisjoint(job.after) and (self.until is None or self.until.leaves(job.least_s)):
                self.left.remove(job)
                return job
        return None

    def put_back(self, job: Job) -> None:
        """Queue a job once more."""
        self.left.append(job)

    def finish(self, job: Job, reason: str) -> None:
        """Mark a job as done or, with a reason, as failed."""
        self.open.discard(job.name)
        if not reason:
            return
        self.failed[job.name] = reason
        while after := next((other for other in self.left if job.name in other.after), None):
            self.left.remove(after)
            self.finish(after, f"it comes after {job.name}, which failed")

    def check_time(self, running: int) -> None:
        """Raise OutOfTimeError if running jobs must stop, or if none runs and none could start just now."""
        if self.until is not None and (self.until.is_near or not running):
            error = OutOfTimeError()
            error.failed = self.failed
            raise error


def attempt_job(job: Job, folder: str) -> str:
    """Do a job in a working folder; return why it failed, or an empty text. KeyboardInterrupt is not caught."""
    if not Path(folder).is_dir():
        return f"{folder} does not exist: all machines must see the working folder under the same path"
    os.chdir(folder)
    try:
        job.function(*job.arguments)
    except (Exception, SystemExit) as error:  # SystemExit by a user-written mechanism
        if os.environ.get("ATTNLAB_TRACE"):
            traceback.print_exc()
        return (
            describe_error(error) if isinstance(error, Exception) else own_files.explain(error) or describe_error(error)
        )
    return ""
