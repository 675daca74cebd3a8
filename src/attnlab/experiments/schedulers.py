"""Many independent runs: each a job in a process of its own, on this machine or on a Ray cluster.

    with scheduler("local", jobs=4, device="auto") as on:
        failed = on.run([Job("a", work, (1,)), Job("b", work, (2,))])      the reason of each that failed, by name

A job's effect is what it leaves on disk, so one that died is started again and goes on where its folder stands. One
that fails says why and the others go on. Interrupted, all stop as a run does on Ctrl-C: nothing is lost.
"""

from collections.abc import Callable

from attnlab.config import suggest_nearest
from attnlab.experiments.jobs import Job, Scheduler
from attnlab.experiments.local import Local
from attnlab.experiments.ray_cluster import OnRay

__all__ = ["SCHEDULERS", "Job", "Scheduler", "scheduler"]

SCHEDULERS: dict[str, Callable[[int | None, str], Scheduler]] = {"local": Local, "ray": OnRay}


def scheduler(on: str, *, jobs: int | None = None, device: str = "auto") -> Scheduler:
    """Where jobs run; jobs: so many at a time at most, else as many as fit."""
    if on not in SCHEDULERS:
        raise ValueError(f"--on {on}{suggest_nearest(on, SCHEDULERS)}: expected one of {', '.join(SCHEDULERS)}")
    if jobs is not None and jobs < 1:
        raise ValueError(f"--jobs must be at least 1, not {jobs}")
    return SCHEDULERS[on](jobs, device)
