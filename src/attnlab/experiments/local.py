"""Jobs on this machine: on a CPU as many as there are cores, on GPUs one on each, unless it is said how many.

A job's process is forked from a server that has imported modules and done nothing else, so it starts at once and shares
nothing with another. It is in a session of its own: Ctrl-C reaches this process alone, which asks each job to stop by
one SIGTERM. Should this process be killed, its jobs find the pipe closed, and stop by themselves.
"""

import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from attnlab.experiments.jobs import POLL_S, RETRIES, Job, Scheduler, Waiting, attempt
from attnlab.training.runs import choose_device

PRELOADED = [  # what every run imports, and what measures it
    "attnlab.decoding.evaluation", "accelerate", "torch._dynamo", "pandas", "scipy.stats", "matplotlib.figure",
]  # fmt: skip


class Local(Scheduler):
    here = True

    def __init__(self, jobs: int | None, device: str) -> None:
        where = choose_device(device)
        self.device = where.type
        self.cards = _cards() if self.device == "cuda" else []
        if self.cards and where.index is not None and ":" in device:
            self.cards = [self.cards[where.index]]
        self.slots = jobs or (len(self.cards) if self.cards else max(1, _cores() // _threads_said(1)))
        self.context: Any = multiprocessing.get_context("forkserver")

    def run(
        self, jobs: Sequence[Job], *, alone: bool = False, watch: Callable[[], None] = lambda: None
    ) -> dict[str, str]:
        waiting, died = Waiting(jobs), Counter[str]()
        self._start_server({job.function.__module__ for job in jobs})
        slots = 1 if alone else max(1, min(self.slots, len(waiting)))
        threads = _threads_said(max(1, _cores() // slots))
        free, running = list(range(slots)), list[_Worker]()
        try:
            while waiting or running:
                while free and (job := waiting.take()):
                    running.append(_Worker(self.context, job, free.pop(0), threads, self.cards))
                heard = wait([worker.link for worker in running], timeout=POLL_S)
                for worker in [worker for worker in running if worker.link in heard]:
                    running.remove(worker)
                    free.append(worker.slot)
                    reason = worker.reason()
                    if reason is not None:
                        waiting.ended(worker.job, reason)
                    elif died[worker.job.name] < RETRIES:
                        died[worker.job.name] += 1
                        waiting.again(worker.job)
                    else:
                        waiting.ended(worker.job, f"its process died {RETRIES + 1} times ({worker.ended()})")
                watch()
        except BaseException:
            _stop(running)
            raise
        return waiting.failed

    def _start_server(self, modules: set[str]) -> None:
        """Where there is none yet. Ctrl-C is not for it: while it imports it would die of it with a traceback."""
        self.context.set_forkserver_preload([*PRELOADED, *sorted(modules - {"__main__"})])
        resource_tracker.ensure_running()  # else the server starts it, which lets Ctrl-C through again
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Worker:
    """A process that does one job."""

    def __init__(self, context: Any, job: Job, slot: int, threads: int, cards: Sequence[str]) -> None:
        self.job, self.slot = job, slot
        self.link, theirs = context.Pipe()
        card = cards[slot % len(cards)] if cards else None
        arguments = (job, theirs, os.getcwd(), dict(os.environ), threads, card)
        self.process: BaseProcess = context.Process(target=_work, args=arguments, name=f"attnlab: {job.name}")
        self.process.start()
        theirs.close()

    def reason(self) -> str | None:
        """Why the job failed, empty where it did not; None where its process died before it said."""
        try:
            said = self.link.recv()
        except (EOFError, ConnectionResetError):
            said = None
        self.process.join()
        self.link.close()
        return said

    def ended(self) -> str:
        code = self.process.exitcode or 0
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def _work(job: Job, link: Connection, folder: str, environment: dict[str, str], threads: int, card: str | None) -> None:
    """What a worker's process does; the server that it is forked from has the environment of its own start."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ.clear()
    os.environ.update(environment)
    if card is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = card  # before CUDA is first asked for
    torch.set_num_threads(threads)
    threading.Thread(target=_stop_when_closed, args=(link,), daemon=True).start()
    try:
        said = attempt(job, folder)
    except KeyboardInterrupt:
        said = "stopped"
    with suppress(BrokenPipeError):  # where the process that started it is gone
        link.send(said)


def _stop_when_closed(link: Connection) -> None:
    try:
        link.recv()
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGTERM)


def _stop(running: Sequence[_Worker]) -> None:
    """Ask each once, and wait; asked again meanwhile, end them at once: what their checkpoints hold stays."""
    for worker in running:
        worker.process.terminate()
    try:
        for worker in running:
            worker.process.join()
    except KeyboardInterrupt:
        for worker in running:
            worker.process.kill()
        raise


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _threads_said(otherwise: int) -> int:
    """Threads of a job: what OMP_NUM_THREADS says, else its share of the cores."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    return int(said) if said.isdigit() and int(said) else otherwise


def _cards() -> list[str]:
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    return said.split(",") if said else [str(number) for number in range(torch.cuda.device_count())]
