"""`attnlab compare … --on ray` on a cluster of two nodes on this machine, one of which is killed."""

import json
import os
import subprocess
import sys
import time

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'attnlab[ray]'")

from attnlab.commands.compare.speed import UPDATES, WARM_UP, WINDOWS
from attnlab.training.run_folder import RunFolder

STEPS, EVERY = 60, 10
WORDS = ["data=lexicon", "examples=300", "held_out=20", "width=8", "layers=1", "heads=2", "feed_forward=16"]
WORDS += [f"steps={STEPS}", f"checkpoint_every={EVERY}", "batch_tokens=400", "seeds=1", "device=cpu"]
WORDS += ["attention=./counted.py:Counted,./counted.py:Other", "--no-controls"]
COUNTED = """
import time
from attnlab.mechanisms.softmax import Softmax


class Counted(Softmax):
    def mix(self, q, *more, **named):
        '''Slow enough to be killed in the middle; leaves a mark for every call in training.'''
        if self.training and q.device.type != "meta":
            time.sleep(0.02)
            with open("calls", "ab") as file:
                file.write(b".")
        return super().mix(q, *more, **named)


class Other(Counted):
    def weights(self, q, *more, **named):
        return super().weights(2 * q, *more, **named)

    def mix(self, q, *more, **named):
        return super().mix(2 * q, *more, **named)
"""
ATTENTIONS = 3  # calls in an update: of the encoder, of the decoder, and between them
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_timeout_ms": 300,
         "health_check_failure_threshold": 3}  # fmt: skip


@pytest.fixture
def cluster(monkeypatch):
    """A head that runs nothing, and two nodes that run one job each."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": QUICK})
    yield made
    made.shutdown()


def start(folder, *words, **environment):
    folder.mkdir(exist_ok=True)
    (folder / "counted.py").write_text(COUNTED)
    code = "from attnlab.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, "compare", "synthetic", *WORDS, *words], cwd=folder, text=True,
        env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def table(folder):
    found = json.loads((folder / "out" / "results.json").read_text())
    return [
        {key: row[key] for key in ("row", "parameters", "flops_per_token", "failed", "measures")}
        for row in found["rows"]
    ]


def until(found, process):
    end = time.monotonic() + 60
    while not (seen := found()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)
    return seen


@pytest.mark.slow
def test_a_node_that_dies_costs_no_more_than_the_steps_since_a_checkpoint(cluster, tmp_path):
    here, there = tmp_path / "local", tmp_path / "ray"
    doomed, _ = (cluster.add_node(num_cpus=1) for _ in range(2))
    process = start(there, "out=out", "--on=ray", RAY_ADDRESS=cluster.address)

    def at_work():
        """The runs that are being trained, once there are two of them between their first checkpoint and their last."""
        runs = [RunFolder(path) for path in there.glob("runs/*")]
        busy = [run for run in runs if run.is_locked() and EVERY <= run.position().get("step", 0) < STEPS - EVERY]
        return busy if len(busy) == 2 else []

    busy = until(at_work, process)
    cluster.remove_node(doomed, allow_graceful=False)
    (stopped,) = until(lambda: [run for run in busy if not run.is_locked() and run.position()["step"] < STEPS], process)
    stood = stopped.position()["step"]
    assert EVERY <= stood < STEPS
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert stopped.position()["finished"]
    calls = (there / "calls").stat().st_size / ATTENTIONS
    needed = 2 * (STEPS + (WARM_UP["cpu"] + WINDOWS) * UPDATES["cpu"])  # of two rows, their training and their timing
    assert needed <= calls <= needed + EVERY
    local = start(here, "out=out", "--jobs=2")
    _, errors = local.communicate(timeout=120)
    assert local.returncode == 0, errors
    assert table(there) == table(here)
    assert "report:" in output
