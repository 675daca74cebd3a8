import os
import signal
from importlib.util import find_spec

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for processes that are started here, as below for this one
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU; read when triton is first imported

import pytest
from chromium import chromium, opened  # noqa: F401 (fixtures)

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    from interpreter import skip_idle_work

    skip_idle_work()

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # where it was ignored, programs started here would ignore it


LONG = (  # files of about 8 seconds or more, the longest first
    "test_demo", "test_inspect", "test_together", "test_compare_run", "test_kernel_mixed_heads", "test_kernel_coda",
    "test_snell_runs", "test_kernel_one_pass", "test_zheng2021", "test_survey", "test_kernel_sparsemax",
    "test_tasks_data", "test_kernel_unit_rows", "test_align", "test_train", "test_compile", "test_diagnose",
    "test_alignment_study", "test_compare_controls", "test_going_on", "test_recurrence", "test_seeding",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config, items):
    """Mark the tests that open a browser; skip those that need a GPU where there is none.

    Of several workers, which take one file after the other, none begins a long file while the others end.
    """
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))
    for item in items:
        if "chromium" in item.fixturenames:
            item.add_marker(pytest.mark.browser)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _draft_figures(request):
    """Draw each figure once, as .png, and lay it out only if the file has none of its size and number of panels yet.

    .svg and .pdf take twice the time of .png, and a layout as much as a .png. The tests named here draw all of it.
    """
    if request.module.__name__ in ("test_report", "test_fonts", "test_demo") or find_spec("matplotlib") is None:
        yield
        return
    from attnlab.report import figures

    render, shapes = figures._render, set()

    def draft(figure, form, metadata):
        if form != "png":
            return b"not drawn here"
        shape = (*figure.get_size_inches(), len(figure.axes))
        if shape in shapes:
            figure.set_layout_engine(None)
        shapes.add(shape)
        return render(figure, form, metadata)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "_render", draft)
        yield
