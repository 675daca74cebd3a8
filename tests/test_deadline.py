"""--until: a duration or a clock time; jobs that would not reach a checkpoint are not started."""

import time

import pytest
from in_process import run_attnlab

from attnlab.experiments.deadline import GRACE_S, Deadline, OutOfTimeError
from attnlab.experiments.jobs import Job, JobQueue
from attnlab.experiments.local import Local


@pytest.mark.parametrize(
    ("text", "seconds"), [("45s", 45), ("9m", 540), ("1h30m", 5400), ("2h", 7200), ("1h0m5s", 3605)]
)
def test_a_duration(text, seconds):
    assert Deadline.parse(text).end - time.monotonic() == pytest.approx(seconds, abs=1)


def test_a_clock_time_is_the_next_one():
    left = Deadline.parse(time.strftime("%H:%M", time.localtime(time.time() + 7200))).end - time.monotonic()
    assert 7200 - 61 < left <= 7200
    passed = Deadline.parse(time.strftime("%H:%M", time.localtime(time.time() - 3600))).end - time.monotonic()
    assert 22 * 3600 < passed < 24 * 3600


@pytest.mark.parametrize("text", ["", "9", "m", "0m", "25:00", "12:60", "1m1h", "-5m", "9 m"])
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="--until"):
        Deadline.parse(text)


def test_a_job_that_needs_more_time_is_not_started():
    until = Deadline(time.monotonic() + GRACE_S + 50)
    jobs = [Job("long", print, least_s=100), Job("short", print, least_s=10), Job("after", print, after=("long",))]
    queue = JobQueue(jobs, until)
    assert queue.take().name == "short"
    assert queue.take() is None
    queue.check_time(1)
    with pytest.raises(OutOfTimeError):
        queue.check_time(0)
    assert JobQueue(jobs).take().name == "long"


def test_running_jobs_are_stopped_before_the_deadline(tmp_path):
    with Local(1, "cpu") as on:
        on.run([Job("starts the server of processes", time.sleep, (0,))])
        until, clock = Deadline(time.monotonic() + GRACE_S + 1), time.monotonic()
        with pytest.raises(OutOfTimeError):
            on.run([Job("sleeps", time.sleep, (60,), least_s=0), Job("never", time.sleep, (60,))], until=until)
    assert time.monotonic() - clock < 55  # not when the job ends by itself


COMMAND = ["reproduce", "snell2021", "--only", "section62", "--seeds", "2"]


def call(tmp_path, *words):
    return run_attnlab(*COMMAND, *words, cwd=tmp_path)


def test_a_study_without_time_to_start_a_run_says_what_is_left(tmp_path):
    cut = call(tmp_path, "--until", "21s")
    assert cut.returncode == 0, cut.stderr
    assert "4 of 4 runs are left" in cut.stdout
    assert f"to continue: attnlab {' '.join(COMMAND)}" in cut.stdout


@pytest.mark.slow
def test_a_study_stops_at_a_checkpoint_and_resumes(tmp_path):
    words = ["--scale", "small", "--out", str(tmp_path / "out")]
    cut = call(tmp_path, *words, "--until", "60s")
    assert cut.returncode == 0, cut.stderr
    assert "runs are left" in cut.stdout
    kept = list((tmp_path / "out" / "work" / "populations").rglob("*.safetensors"))
    done = call(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert kept, "nothing was kept"
    assert not any(file.exists() for file in kept)  # resumed, finished and cleaned
