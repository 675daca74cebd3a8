"""A mechanism of the user's own works wherever a name does, and is checked by the same laws."""

import re

import pytest
import torch
from in_process import run_attnlab
from typer.testing import CliRunner

from attnlab.cli import app
from attnlab.experiments.jobs import Job, attempt_job
from attnlab.mechanisms import attention
from attnlab.mechanisms.laws import LAWS, judge_law

MINE = '''
import torch
from attnlab import Mechanism
from attnlab.mechanisms.mechanism import logits

class Mine(Mechanism):
    """Linear attention weights, normalised by their sum."""

    def __init__(self, heads, head_dim, *, power: int = 2, **base):
        super().__init__(heads, head_dim, **base)
        self.power = power

    def weights(self, q, k, mask=None, carry=None, *, causal=False, at=None, bias=None):
        seen = self.visible(q, k, mask, causal=causal, at=at, bias=bias)
        w = logits(q, k, self.scale, bias).masked_fill(~seen, 0.0).pow(self.power)
        return w / w.sum(-1, keepdim=True).clamp_min(1e-9), None

class Forgetful(Mine):
    def weights(self, q, k, mask=None, carry=None, *, causal=False, at=None, bias=None):
        return logits(q, k, self.scale, bias).softmax(-1), None

class Unfinished(Mechanism):
    pass

class NotOne:
    pass
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return "./mine.py"


def run(*words):
    return CliRunner().invoke(app, list(words), terminal_width=200)


def test_it_is_built_by_its_path(mine):
    mechanism = attention(f"{mine}:Mine", heads=3, head_dim=5, power=4)
    assert mechanism.power == 4
    assert mechanism.weights(*torch.randn(2, 1, 3, 7, 5))[0].shape == (1, 3, 7, 7)
    assert type(mechanism) is type(attention(f"{mine}:Mine", heads=1, head_dim=1))


def test_check_passes_a_sound_one(mine):
    result = run("check", f"{mine}:Mine", "power=4")
    assert result.exit_code == 0, result.output
    held, skipped = map(
        int, re.search(rf"(\d+) of {len(LAWS)} laws hold; (\d+) not applicable", result.output).groups()
    )
    assert held + skipped == len(LAWS)


def test_check_fails_a_leaky_one_with_the_numbers(mine):
    result = run("check", f"{mine}:Forgetful")
    assert result.exit_code == 1
    failed = {line.split("FAILS")[0].strip() for line in result.output.splitlines() if "FAILS" in line}
    assert {"the future has no influence", "hidden keys have no influence", "a blind row is zero"} <= failed


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./mine.py:Main", "has no 'Main' .did you mean 'Mine'.*its mechanisms: Mine, Forgetful"),
        ("./mine.py:NotOne", "is not a subclass of attnlab.mechanisms.mechanism.Mechanism"),
        ("./mine.py:Unfinished", "does not define weights"),
        ("./mine.py", "write ./mine.py:Mine"),
        ("./absent.py:Mine", "no file ./absent.py"),
    ],
)
def test_what_is_wrong_is_said(mine, name, message):
    with pytest.raises((ValueError, OSError), match=message):
        attention(name, heads=3, head_dim=5)


def test_a_file_that_does_not_import_says_why(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_that_name")
    with pytest.raises(
        ValueError, match="cannot be imported: ModuleNotFoundError: No module named 'nothing_of_that_name'"
    ):
        attention(f"{tmp_path}/broken.py:Mine", heads=3, head_dim=5)


def test_an_unknown_option_is_named(mine):
    result = run("check", f"{mine}:Mine", "powr=4")
    assert "did you mean 'power'" in str(result.exception)


ENDS = {
    "SystemExit": "raise SystemExit(0)",
    "sys.exit": "import sys; sys.exit()",
    "BaseException": "raise BaseException('[/b] no')",
    "GeneratorExit": "raise GeneratorExit",
}
SMALL = ["data=lexicon", "examples=60", "held_out=20", "layers=1", "width=8", "heads=2", "feed_forward=8"]
SMALL += ["steps=1", "batch_examples=4"]
WEIGHTS = """
from attnlab.mechanisms import Mechanism
from attnlab.mechanisms.mechanism import logits

class Bad(Mechanism):
    def weights(self, q, k, mask=None, carry=None, *, causal=False, at=None, bias=None):
        w = logits(q, k, self.scale, bias).softmax(-1)
        LINE
"""


def train(name, out):
    return run_attnlab("train", "synthetic", *SMALL, "device=cpu", f"attention={name}", f"out={out}")


@pytest.mark.parametrize("command", ["check", "train", "describe"])
@pytest.mark.parametrize("end", ENDS)
def test_a_file_that_ends_the_process_on_import_is_named(tmp_path, end, command):
    (tmp_path / "bad.py").write_text(ENDS[end])
    name = f"{tmp_path}/bad.py:Bad"
    words = {"check": ["check", name], "train": ["train", "synthetic", f"attention={name}"]}
    done = run_attnlab(*words.get(command, ["describe", "tiny", f"attention={name}"]), cwd=tmp_path)
    assert done.returncode == 2
    assert "bad.py" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("end", ["SystemExit", "sys.exit"])
def test_a_method_that_ends_the_process_fails_the_laws_and_is_named(tmp_path, end):
    (tmp_path / "bad.py").write_text(WEIGHTS.replace("LINE", ENDS[end]))
    done = run_attnlab("check", f"{tmp_path}/bad.py:Bad")
    assert done.returncode == 1
    assert f"{len(LAWS) - 4} fail" in done.stdout
    done = train(f"{tmp_path}/bad.py:Bad", tmp_path / "run")
    assert done.returncode == 2
    assert "bad.py, line 8" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()  # the corrected file would be another run


@pytest.mark.parametrize("end", ENDS)
def test_a_constructor_that_ends_the_process_is_named(tmp_path, end):
    text = f"{WEIGHTS.replace('LINE', 'return w, None')}\n    def __init__(self, heads, head_dim, **base):\n        "
    (tmp_path / "bad.py").write_text(text + ENDS[end])
    for done in (run_attnlab("check", f"{tmp_path}/bad.py:Bad"), train(f"{tmp_path}/bad.py:Bad", tmp_path / "run")):
        assert done.returncode == 2
        assert "bad.py" in done.stderr.splitlines()[-1]


def test_an_interruption_is_one_wherever_it_comes_from(tmp_path):
    (tmp_path / "bad.py").write_text("raise KeyboardInterrupt")
    (tmp_path / "late.py").write_text(WEIGHTS.replace("LINE", "raise KeyboardInterrupt"))
    for name in ("bad", "late"):
        done = run_attnlab("check", f"{tmp_path}/{name}.py:Bad")
        assert (done.returncode, done.stderr) == (130, "attnlab: interrupted\n")


def test_a_job_that_ends_its_process_is_a_failed_job(tmp_path):
    (tmp_path / "bad.py").write_text(WEIGHTS.replace("LINE", "raise SystemExit(0)"))
    kind = type(attention(f"{tmp_path}/bad.py:Bad", heads=2, head_dim=3))
    assert "bad.py, line 8" in attempt_job(Job("bad", kind(2, 3).weights, tuple(torch.randn(2, 1, 2, 4, 3))), ".")
    assert judge_law("a blind row is zero", lambda layer: kind(2, 3)).holds is False


@pytest.mark.parametrize(
    "line",
    [
        "return None", "return w", "return 'w', None", "return w, None, None", "return w[..., :1], None",
        "return w[0], None", "return w > 0, None", "return w, 'carry'", "return w.double(), None",
        "return w.detach().numpy(), None", "raise RuntimeError('[/b] broken')", "raise KeyError(w)", "w.nothing",
        "return w * float('nan'), None", "return w.exp_().mul_(w), None", "import nothing_of_that_name",
    ],
)  # fmt: skip
def test_what_a_bad_mechanism_does_in_training_is_one_line(tmp_path, line):
    (tmp_path / "bad.py").write_text(WEIGHTS.replace("LINE", line))
    done = train(f"{tmp_path}/bad.py:Bad", tmp_path / "run")
    assert done.returncode == 2
    assert ("not finite" if "nan" in line else "bad.py") in done.stderr.splitlines()[-1]
    lines = [text for text in done.stderr.splitlines() if not text.startswith("full speed")]
    assert len(lines) == 2  # what is trained, and the error
