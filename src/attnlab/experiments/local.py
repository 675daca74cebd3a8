"""Jobs on this machine: by default one per core on a CPU, one per GPU otherwise.

The process of a job is forked from a server that has only imported modules, so it starts at once and shares nothing. It
has its own session: Ctrl-C reaches the parent alone, which sends each job one SIGTERM. If the parent is killed, its
jobs find their pipe closed and stop.
"""

import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from attnlab.experiments.deadline import Deadline
from attnlab.experiments.jobs import POLL_S, RETRIES, Job, JobQueue, Scheduler, attempt_job
from attnlab.training.runs import choose_device

PRELOADED = [  # what training and measuring a run imports
    "attnlab.decoding.evaluation", "torch._dynamo", "pandas", "scipy.stats", "matplotlib.figure", "sacrebleu",
]  # fmt: skip
HAS_FORK_SERVER = hasattr(os, "fork")  # Windows has none, and starts each worker afresh


class Local(Scheduler):
    """Jobs in processes of this machine."""

    here = True

    def __init__(self, jobs: int | None, device: str) -> None:
        where = choose_device(device)
        self.device = where.type
        self.cards = _list_cards() if self.device == "cuda" else []
        if self.cards and where.index is not None and ":" in device:
            self.cards = [self.cards[where.index]]
        self.slots = jobs or (len(self.cards) if self.cards else max(1, _count_cores() // _count_threads(1)))
        self.context: Any = multiprocessing.get_context("forkserver" if HAS_FORK_SERVER else "spawn")

    def run(
        self,
        jobs: Sequence[Job],
        *,
        alone: bool = False,
        watch: Callable[[], None] = lambda: None,
        until: Deadline | None = None,
    ) -> dict[str, str]:
        waiting, died = JobQueue(jobs, until), Counter[str]()
        self._start_server({job.function.__module__ for job in jobs})
        slots = 1 if alone else max(1, min(self.slots, len(waiting)))
        threads = _count_threads(max(1, _count_cores() // slots))
        free, running = list(range(slots)), list[_Worker]()
        try:
            while waiting or running:
                while free and (job := waiting.take()):
                    running.append(_Worker(self.context, job, free.pop(0), threads, self.cards))
                waiting.check_time(len(running))
                heard = wait([worker.link for worker in running], timeout=POLL_S)
                for worker in [worker for worker in running if worker.link in heard]:
                    running.remove(worker)
                    free.append(worker.slot)
                    reason = worker.read_reason()
                    if reason is not None:
                        waiting.finish(worker.job, reason)
                    elif died[worker.job.name] < RETRIES:
                        died[worker.job.name] += 1
                        waiting.put_back(worker.job)
                    else:
                        waiting.finish(worker.job, f"its process died {RETRIES + 1} times ({worker.describe_end()})")
                watch()
        except BaseException:
            _stop(running)
            raise
        return waiting.failed

    def _start_server(self, modules: set[str]) -> None:
        """Start the fork server unless it runs, with Ctrl-C blocked: it would print a traceback while it imports."""
        if not HAS_FORK_SERVER:
            return
        from multiprocessing import forkserver, resource_tracker

        self.context.set_forkserver_preload([*PRELOADED, *sorted(modules - {"__main__"})])
        resource_tracker.ensure_running()  # otherwise the server starts it and unblocks Ctrl-C
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Worker:
    """One process with its job."""

    def __init__(self, context: Any, job: Job, slot: int, threads: int, cards: Sequence[str]) -> None:
        self.job, self.slot = job, slot
        self.link, theirs = context.Pipe()
        card = cards[slot % len(cards)] if cards else None
        arguments = (job, theirs, os.getcwd(), dict(os.environ), threads, card)
        self.process: BaseProcess = context.Process(target=_work, args=arguments, name=f"attnlab: {job.name}")
        self.process.start()
        theirs.close()

    def read_reason(self) -> str | None:
        """Return why the job failed, or an empty text; None if its process died first."""
        try:
            reason: str | None = self.link.recv()
        except (EOFError, ConnectionResetError):
            reason = None
        self.process.join()
        self.link.close()
        return reason

    def describe_end(self) -> str:
        code = self.process.exitcode or 0
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def _work(job: Job, link: Connection, folder: str, environment: dict[str, str], threads: int, card: str | None) -> None:
    """Run one job in a worker process; the fork server may have an older environment."""
    if HAS_FORK_SERVER:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ.clear()
    os.environ.update(environment)
    if card is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = card  # before CUDA is initialized
    torch.set_num_threads(threads)
    threading.Thread(target=_stop_when_closed, args=(link,), daemon=True).start()
    try:
        reason = attempt_job(job, folder)
    except KeyboardInterrupt:
        reason = "stopped"
    with suppress(BrokenPipeError):  # the parent is gone
        link.send(reason)


def _stop_when_closed(link: Connection) -> None:
    try:
        link.recv()
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGTERM)


def _stop(running: Sequence[_Worker]) -> None:
    """Ask every worker to stop and wait; a second Ctrl-C kills them. Their checkpoints stay."""
    for worker in running:
        worker.process.terminate()
    try:
        for worker in running:
            worker.process.join()
    except KeyboardInterrupt:
        for worker in running:
            worker.process.kill()
        raise


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _count_threads(default: int) -> int:
    """Return the number of threads of a job: OMP_NUM_THREADS, or its share of the cores."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdigit() and int(text) else default


def _list_cards() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
