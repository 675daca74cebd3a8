"""Where jobs run: on this machine or on a Ray cluster.

    with open_scheduler("local", jobs=4, device="auto") as on:
        failed = on.run([Job("a", work, (1,)), Job("b", work, (2,))])      the reason of each that failed, by name

A job leaves its effect on disk. A job that died starts again and resumes, a job that fails leaves the others running.
"""

from collections.abc import Callable

from attnlab.config import suggest_nearest
from attnlab.experiments.jobs import Scheduler
from attnlab.experiments.local import Local
from attnlab.experiments.ray_cluster import OnRay

SCHEDULERS: dict[str, Callable[[int | None, str], Scheduler]] = {"local": Local, "ray": OnRay}


def open_scheduler(on: str, *, jobs: int | None = None, device: str = "auto") -> Scheduler:
    """Return the scheduler with this name; `jobs` limits how many run at a time."""
    if on not in SCHEDULERS:
        raise ValueError(f"--on {on}{suggest_nearest(on, SCHEDULERS)}: expected one of {', '.join(SCHEDULERS)}")
    if jobs is not None and jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {jobs}")
    return SCHEDULERS[on](jobs, device)
