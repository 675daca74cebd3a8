"""A scheduler that runs jobs in this process, for tests that do not test processes."""

import os

from attnlab.experiments.jobs import JobQueue, Scheduler, attempt_job


class InlineScheduler(Scheduler):
    here = True

    def __init__(self, device="cpu"):
        self.device = device
        self.names = []  # of the jobs that ran, in order

    def run(self, jobs, *, alone=False, watch=lambda: None, until=None):
        queue = JobQueue(jobs, until)
        while queue:
            job = queue.take()
            queue.check_time(0 if job is None else 1)
            self.names.append(job.name)
            queue.finish(job, attempt_job(job, os.getcwd()))
            watch()
        return queue.failed
