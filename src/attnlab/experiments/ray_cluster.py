"""Jobs on a Ray cluster: one task each, which Ray restarts elsewhere when its machine dies.

The cluster is the one at RAY_ADDRESS, or one that runs here; otherwise Ray starts on this machine. All machines must
see the working folder and the run folders under the same paths. Nothing else is exchanged.
"""

import logging
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

from attnlab.config import describe_error
from attnlab.experiments.deadline import Deadline
from attnlab.experiments.jobs import POLL_S, RETRIES, Job, JobQueue, Scheduler, attempt_job


class OnRay(Scheduler):
    """Jobs as tasks of a Ray cluster."""

    here = False

    def __init__(self, jobs: int | None, device: str) -> None:
        try:
            import ray
        except ImportError:
            raise ImportError("--on ray needs Ray: pip install 'attnlab[ray]', or use --on local") from None
        if ":" in device:
            raise ValueError(f"device={device}: Ray assigns the GPUs; use device=cuda")
        self.ray: Any = ray
        self.slots = jobs
        self.joined = not ray.is_initialized()
        if self.joined:
            address = os.environ.get("RAY_ADDRESS")
            _check_answers(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        cards = self.ray.cluster_resources().get("GPU", 0)
        self.device = ("cuda" if cards else "cpu") if device == "auto" else device
        if self.device == "cuda" and not cards:
            self.__exit__()
            raise ValueError("device=cuda, but no machine of this Ray cluster has a GPU; use device=cpu")

    def run(
        self,
        jobs: Sequence[Job],
        *,
        alone: bool = False,
        watch: Callable[[], None] = lambda: None,
        until: Deadline | None = None,
    ) -> dict[str, str]:
        waiting, folder = JobQueue(jobs, until), os.getcwd()
        slots = 1 if alone else self.slots or len(waiting)
        needs = {"num_cpus": 1, "num_gpus": 1 if self.device == "cuda" else 0}
        task = self.ray.remote(max_retries=RETRIES, max_calls=1, **needs)(attempt_job)
        running: dict[Any, Job] = {}
        try:
            while waiting or running:
                while len(running) < slots and (job := waiting.take()):
                    running[task.options(name=job.name).remote(job, folder)] = job
                waiting.check_time(len(running))
                for done in self.ray.wait(list(running), timeout=POLL_S)[0]:
                    waiting.finish(running.pop(done), self._read_reason(done))
                watch()
        except BaseException:
            for task in running:
                self.ray.cancel(task)  # like Ctrl-C: the run writes a checkpoint and stops
            self.ray.wait(list(running), num_returns=len(running)) if running else None
            raise
        return waiting.failed

    def _read_reason(self, done: Any) -> str:
        try:
            reason: str = self.ray.get(done)
            return reason
        except self.ray.exceptions.RayError as error:
            return f"Ray gave up: {describe_error(error)}"

    def __exit__(self, *exception: object) -> None:
        if self.joined:
            self.ray.shutdown()


def _check_answers(address: str | None) -> None:
    """Refuse an address that does not answer; Ray would wait for minutes."""
    host, colon, port = (address or "").rpartition("://")[2].rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except OSError as error:
        raise ConnectionError(f"no Ray cluster answers at RAY_ADDRESS={address} ({error})") from None
