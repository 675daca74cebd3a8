"""The wheel works without the repository; version, bounds and files of a release agree."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import attnlab

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NEEDED = ("pyproject.toml", "README.md", "LICENSE", "src")  # to build a wheel


def build_wheel(folder: Path) -> Path:
    """Build a wheel from a copy of the sources, with the setuptools that is installed."""
    for name in NEEDED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / "copy" / name, ignore=shutil.ignore_patterns("*.egg-info", "*.pyc"))
        else:
            (folder / "copy").mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "copy" / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", folder / "dist", folder / "copy"], check=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


@pytest.mark.slow
def test_the_wheel_works_without_the_repository(tmp_path):
    wheel = build_wheel(tmp_path)
    assert wheel.name == f"attnlab-{attnlab.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    for path in (ROOT / "src" / "attnlab").rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            assert path.relative_to(ROOT / "src").as_posix() in names
    assert not [name for name in names if name.startswith(("tests", "tools", "benchmarks"))]
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    scripts = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin")
    install = [scripts / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True)
    where = subprocess.run(
        [scripts / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    shared = sysconfig.get_path("purelib")  # the dependencies, but no editable attnlab: its .pth is not read there
    (Path(where.stdout.strip()) / "dependencies.pth").write_text(f"{shared}\n")
    (tmp_path / "work").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    how = {"cwd": tmp_path / "work", "env": environment, "capture_output": True, "text": True, "check": False}
    words = ["attention=softmax,dagpam", "steps=5", "batch=7", "copying=false", "--seeds", "1", "--no-open"]
    done = subprocess.run([scripts / "attnlab", "demo", *words], **how)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "work" / "runs" / "demo" / "report.html").read_text(encoding="utf-8")
    assert "<script" in page
    code = "import attnlab, json; print(json.dumps([attnlab.__file__, attnlab.__version__]))"
    file, version = json.loads(subprocess.run([scripts / "python", "-c", code], **how).stdout)
    assert Path(file).is_relative_to(tmp_path / "env")
    assert version == attnlab.__version__


def test_a_release_has_one_version_and_one_date():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == attnlab.__version__
    assert cited["license"] == PROJECT["license"]
    assert "version" in PROJECT["dynamic"]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {attnlab.__version__} - {cited['date-released']}\n" in changes
    headings = re.findall(r"^## (\S+)", changes, re.MULTILINE)
    assert headings.index(attnlab.__version__) == len([name for name in headings if name == "Unreleased"])


def test_every_dependency_has_a_lower_bound_with_a_reason():
    lowest = runpy.run_path(str(ROOT / "tools" / "lowest.py"))["list_lowest"]([])
    names = {text.split("==")[0] for text in lowest}
    assert len(names) == len(PROJECT["dependencies"])
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for each in lowest:
        name, version = each.split("==")
        assert re.search(rf"\| `{name}` \| {re.escape(version)} \|", text), f"CONTRIBUTING.md lacks {name} {version}"


def test_every_extra_is_there_and_pinned():
    assert {"hub", "ray", "align", "docs", "dev"} <= PROJECT["optional-dependencies"].keys()
    pins = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line
    }
    extras = PROJECT["optional-dependencies"]
    for text in [*PROJECT["dependencies"], *extras["dev"], *extras["docs"]]:
        name = re.match(r"[\w.-]+", text)[0].lower().replace("_", "-")
        assert name == "attnlab" or name in pins, f"constraints.txt has no {name}"


def test_the_hosted_checks_call_targets_that_exist():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    called = re.findall(r"make ([\w-]+)", json.dumps(workflow))
    assert called
    assert set(called) <= targets
    versions = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    named = [text.rsplit(" ", 1)[1] for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)]
    assert versions == named
