"""The page docs/ecosystem.md: its code runs, and its losses are those that were measured."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attnlab.huggingface.neutral import NEUTRAL
from attnlab.huggingface.registration import PARAMETER_FREE

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "ecosystem.md").read_text(encoding="utf-8")


@pytest.mark.docs
def test_the_code_of_the_page_runs(tmp_path):
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "DaGPAM" in done.stdout
    assert "'weights'" in done.stdout


def test_the_losses_of_the_page_were_measured():
    text = (ROOT / "results" / "neutral" / "neutral.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    for row in rows[1:]:
        name, default, neutral = row["attention"], row["loss_default_nats"], row["loss_neutral_nats"]
        assert bool(neutral) == (name in NEUTRAL)
        if neutral:
            assert f"| `{name}` | {default} | {neutral} |" in PAGE
        elif default[0].isdigit():
            assert f"`{name}` {float(default):.2f}" in PAGE


def test_the_page_names_every_registered_attention():
    names = re.search(r"The names are `attnlab-` followed by (.*?)\.", PAGE, re.DOTALL)[1]
    assert [name.strip() for name in re.split(",| or ", names)] == list(PARAMETER_FREE)
