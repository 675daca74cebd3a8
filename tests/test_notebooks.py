"""The notebooks run from the first cell to the last, in a folder of their own, and are saved without outputs."""

import gc
import json
import os
import re
import sys
from pathlib import Path

import pytest
from peers import need

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_saved_clean_and_its_links_lead_somewhere(path):
    book = json.loads(path.read_text(encoding="utf-8"))
    assert book["nbformat"] == 4
    assert "pip install -q attnlab" in "".join(book["cells"][1]["source"])  # on Colab, before the first import
    assert f"colab.research.google.com/github/OWNER/attnlab/blob/main/docs/notebooks/{path.name})" in "".join(
        book["cells"][0]["source"]
    )
    for cell in book["cells"]:
        text = "".join(cell["source"])
        assert not cell.get("outputs"), f"{path.name} has outputs: clear them"
        assert cell.get("execution_count") is None
        for link in re.findall(r"\]\((\.\./[^)#]+)", text):
            assert (path.parent / link).exists(), link


@need("nbclient", "nbformat", "ipykernel")
@pytest.mark.docs
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    import nbclient
    import nbformat
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("MPLBACKEND", "agg")
    manager = AsyncKernelManager(kernel_spec_manager=KernelSpecManager(), kernel_name="python3")
    manager.kernel_cmd = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (tmp_path / "work").mkdir()
    book = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(book, km=manager, timeout=600, resources={"metadata": {"path": tmp_path / "work"}})
    client.execute()
    del client, manager
    gc.collect()  # its open sockets warn here, not in the next test of this process
    text = "".join(each.get("text", "") for cell in book.cells for each in cell.get("outputs", []))
    expected = {
        "align-and-project": r"9\d\.\d% of 2,400 tags are right|100\.0% of 2,400",
        "compare-with-seeds": r"dagpam: (better|worse|open)",
        "read-a-model": r"6 layers; weights: \(2, 12, ",
        "your-own-attention": r"loss after fine-tuning \d\.\d+",
    }[path.stem]
    assert re.search(expected, text), text
