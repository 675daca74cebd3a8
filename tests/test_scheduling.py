"""Jobs in processes of their own: what fails is told, what dies is tried again, and who is alone is alone."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from attnlab.experiments import local as local_module
from attnlab.experiments.jobs import RETRIES, Job, JobQueue
from attnlab.experiments.schedulers import open_scheduler


def touch(folder, name):
    (Path(folder) / name).touch()


def fails(kind, message):
    raise kind(message)


def dies(folder, times):
    """Killed so many times, and then done."""
    before = len(list(Path(folder).glob("death-*")))
    if before < times:
        touch(folder, f"death-{before}")
        os.kill(os.getpid(), signal.SIGKILL)
    touch(folder, "done")


def meets(folder, own, other):
    """Done only if the other is there at the same time."""
    touch(folder, own)
    end = time.monotonic() + 30
    while not (Path(folder) / other).exists():
        if time.monotonic() > end:
            raise TimeoutError("nobody came")
        time.sleep(0.01)


def is_alone(folder):
    busy = Path(folder) / "busy"
    busy.touch(exist_ok=False)
    time.sleep(0.05)
    busy.unlink()


def writes_where(name):
    Path(name).write_text(f"{os.getpid()} {os.getsid(0)}")


@pytest.fixture(scope="module")
def two():
    with open_scheduler("local", jobs=2, device="cpu") as made:
        yield made


def test_one_that_fails_says_why_and_the_others_go_on(two, tmp_path):
    jobs = [Job("a", fails, (ValueError, "say  b=2\ninstead")), Job("b", fails, (RuntimeError, "boom"))]
    found = two.run([*jobs, Job("c", touch, (str(tmp_path), "c"))])
    assert found == {"a": "say b=2 instead", "b": "RuntimeError: boom"}
    assert (tmp_path / "c").exists()


def test_one_that_dies_is_tried_again(two, tmp_path):
    assert two.run([Job("a", dies, (str(tmp_path), RETRIES))]) == {}
    assert (tmp_path / "done").exists()


def test_one_that_dies_each_time_is_given_up(two, tmp_path):
    assert two.run([Job("a", dies, (str(tmp_path), 99))]) == {"a": f"its process died {RETRIES + 1} times (SIGKILL)"}
    assert len(list(tmp_path.glob("death-*"))) == RETRIES + 1


def test_as_many_as_are_asked_for_run_at_a_time(two, tmp_path):
    where = str(tmp_path)
    assert two.run([Job("a", meets, (where, "a", "b")), Job("b", meets, (where, "b", "a"))]) == {}


def test_alone_is_one_after_another(two, tmp_path):
    assert two.run([Job(str(k), is_alone, (str(tmp_path),)) for k in range(5)], alone=True) == {}


def test_each_has_a_process_and_a_session_of_its_own_in_the_working_folder(two, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert two.run([Job(name, writes_where, (name,)) for name in "ab"]) == {}
    pids = [tuple(map(int, (tmp_path / name).read_text().split())) for name in "ab"]
    assert len({pid for pid, _ in pids} | {os.getpid()}) == 3
    assert all(pid == session for pid, session in pids)


def writes_environment(name):
    Path(name).write_text(os.environ.get("ATTNLAB_DATA", ""))


def test_each_has_the_environment_of_now(two, tmp_path, monkeypatch):
    for said in ("here", "there"):
        monkeypatch.setenv("ATTNLAB_DATA", said)
        two.run([Job(said, writes_environment, (str(tmp_path / said),))])
        assert (tmp_path / said).read_text() == said


def test_a_card_that_is_named_is_the_one(monkeypatch):
    monkeypatch.setattr(local_module, "choose_device", torch.device)
    monkeypatch.setattr(local_module, "_list_cards", lambda: ["4", "7"])
    assert local_module.Local(None, "cuda:1").cards == ["7"]
    assert local_module.Local(None, "cuda").cards == ["4", "7"]


def needs(folder, *names):
    """Done only if these files are there."""
    for name in names:
        (Path(folder) / name).rename(Path(folder) / f"{name}, seen")


def test_one_that_comes_after_others_is_started_when_they_are_done(two, tmp_path):
    where = str(tmp_path)
    first = [Job(name, touch, (where, name)) for name in "ab"]
    assert two.run([Job("c", needs, (where, "a", "b"), after=("a", "b")), *first]) == {}
    assert {file.name for file in tmp_path.iterdir()} == {"a, seen", "b, seen"}


def test_what_comes_after_one_that_failed_fails_unstarted(two, tmp_path):
    where = str(tmp_path)
    jobs = [Job("c", touch, (where, "c"), after=("b",)), Job("b", touch, (where, "b"), after=("a",))]
    found = two.run([*jobs, Job("a", fails, (ValueError, "no")), Job("d", touch, (where, "d"))])
    assert found == {
        "a": "no", "b": "it comes after a, which failed", "c": "it comes after b, which failed"
    }  # fmt: skip
    assert [file.name for file in tmp_path.iterdir()] == ["d"]


def test_what_comes_after_a_failed_job_by_two_ways_fails_once():
    waiting = JobQueue([Job("c", touch, after=("a", "b")), Job("b", touch, after=("a",)), Job("a", touch)])
    waiting.finish(waiting.take(), "no")
    assert waiting.failed.keys() == {"a", "b", "c"}
    assert len(waiting) == 0


def test_of_those_that_can_be_started_the_first_is():
    waiting = JobQueue([Job("late", touch, after=("x",)), Job("x", touch), Job("y", touch)])
    x, y = waiting.take(), waiting.take()
    assert (x.name, y.name, waiting.take(), len(waiting)) == ("x", "y", None, 1)
    waiting.put_back(y)
    waiting.finish(x, "")
    assert [waiting.take().name, waiting.take().name] == ["late", "y"]
    assert waiting.failed == {}


def test_it_is_watched(two, tmp_path):
    looks = []
    two.run([Job("a", touch, (str(tmp_path), "a"))], watch=lambda: looks.append(1))
    assert looks


def test_what_is_wrong_is_said(two):
    with pytest.raises(ValueError, match=r"--on rya \(did you mean 'ray'"):
        open_scheduler("rya")
    with pytest.raises(ValueError, match="--jobs"):
        open_scheduler("local", jobs=0)
    with pytest.raises(ValueError, match="two jobs"):
        two.run([Job("a", touch), Job("a", touch)])
    with pytest.raises(ValueError, match="not among"):
        two.run([Job("a", touch, after=("b",))])
    with pytest.raises(ValueError, match="wait for each other"):
        two.run([Job("a", touch, after=("b",)), Job("b", touch, after=("a",))])
    with pytest.raises(ValueError, match="device=rocket"):
        open_scheduler("local", device="rocket")


def test_as_many_fit_as_there_are_cores_for_their_threads(monkeypatch):
    monkeypatch.setattr(local_module, "_count_cores", lambda: 7)
    for said, slots in (("1", 7), ("3", 2), ("99", 1), ("", 7)):
        monkeypatch.setenv("OMP_NUM_THREADS", said)
        assert open_scheduler("local", device="cpu").slots == slots
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-5")
    assert local_module._list_cards() == ["2", "GPU-5"]


def test_without_ray_it_is_said_how_to_have_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'attnlab\[ray\]'"):
        open_scheduler("ray")


class SmallCluster:
    """Ray where there is no GPU."""

    left = False

    def is_initialized(self):
        return False

    def init(self, **options):
        self.options = options

    def cluster_resources(self):
        return {"CPU": 4.0}

    def shutdown(self):
        self.left = True


def test_what_is_wrong_with_a_cluster_is_said(monkeypatch):
    cluster = SmallCluster()
    monkeypatch.setitem(sys.modules, "ray", cluster)
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        for address in ("{}:{}", "ray://{}:{}"):
            monkeypatch.setenv("RAY_ADDRESS", address.format(*unheard.getsockname()))
            with pytest.raises(ConnectionError, match="no Ray cluster answers"):
                open_scheduler("ray")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ValueError, match="no machine"):
        open_scheduler("ray", device="cuda")
    assert cluster.left
    assert cluster.options["address"] == "auto"
    with open_scheduler("ray") as on:
        assert (on.device, on.here) == ("cpu", False)


WAITING = """
import sys, time
sys.path.insert(0, sys.argv[2])
from attnlab.experiments.jobs import Job
from attnlab.experiments.schedulers import open_scheduler
from test_scheduling import waits
if __name__ == "__main__":
    with open_scheduler("local", jobs=2, device="cpu") as on:
        on.run([Job(name, waits, (sys.argv[1], name)) for name in "ab"])
"""


def waits(folder, name):
    """Runs until it is asked to stop, and says how often it was."""
    asked = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: asked.append(number))
    touch(folder, name)
    while not asked:
        time.sleep(0.01)
    time.sleep(0.3)
    Path(folder, f"{name}-asked").write_text(" ".join(map(str, asked)))


@pytest.mark.parametrize("how", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_stopped_or_killed_it_asks_each_job_once_to_stop(how, tmp_path):
    """As Ctrl-C does it: the signal goes to the whole group of the terminal."""
    words = [sys.executable, "-c", WAITING, str(tmp_path), str(Path(__file__).parent)]
    process = subprocess.Popen(words, start_new_session=True, stderr=subprocess.PIPE, text=True)
    _until(lambda: all((tmp_path / name).exists() for name in "ab"))
    os.killpg(process.pid, how) if how == signal.SIGINT else process.send_signal(how)
    process.communicate(timeout=30)
    _until(lambda: all((tmp_path / f"{name}-asked").exists() for name in "ab"))
    time.sleep(0.1)
    assert [(tmp_path / f"{name}-asked").read_text() for name in "ab"] == [str(int(signal.SIGTERM))] * 2


STARTING = """
import sys
sys.path.insert(0, sys.argv[2])
from attnlab.experiments.jobs import Job
from attnlab.experiments.schedulers import open_scheduler
from test_scheduling import touch
if __name__ == "__main__":
    with open_scheduler("local", jobs=1, device="cpu") as on:
        print("now", flush=True)
        try:
            on.run([Job("a", touch, (sys.argv[1], "a"))])
        except KeyboardInterrupt:
            print("stopped", flush=True)
"""


@pytest.mark.slow
def test_stopped_before_the_first_job_it_says_nothing_of_its_own(tmp_path):
    """While the server that jobs are forked from imports what they need."""
    words = [sys.executable, "-c", STARTING, str(tmp_path), str(Path(__file__).parent)]
    process = subprocess.Popen(words, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "now\n"
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60) == ("stopped\n", "")


def _until(true, seconds=30):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)
