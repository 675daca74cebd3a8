"""A mechanism of the user's own works wherever a name does, and is checked by the same laws."""

import pytest
import torch
from typer.testing import CliRunner

from attnlab.cli import app
from attnlab.mechanisms import attention

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
        seen = self.visible(q, k, mask, causal=causal, at=at)
        w = logits(q, k, self.scale, bias).pow(self.power).masked_fill(~seen, 0.0)
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
    assert "19 of 19 laws hold or do not apply" in result.output


def test_check_fails_a_leaky_one_with_the_numbers(mine):
    result = run("check", f"{mine}:Forgetful")
    assert result.exit_code == 1
    failed = {line.split("FAILS")[0].strip() for line in result.output.splitlines() if "FAILS" in line}
    assert {"the future has no influence", "hidden keys have no influence", "a blind row is zero"} <= failed


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./mine.py:Main", "has no 'Main' .did you mean 'Mine'.*its mechanisms: Mine, Forgetful"),
        ("./mine.py:NotOne", "is not a subclass of attnlab.Mechanism"),
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
