"""attnlab on systems without fork, flock and Triton: macOS and Windows. What they lack is taken away here."""

import ast
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnlab.files import lock_file, locking, write_text

SOURCE = Path(__file__).parent.parent / "src" / "attnlab"
UNIX_ONLY = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
UNIX_CALLS = {
    ("os", "fork"), ("os", "forkpty"), ("os", "getuid"), ("os", "geteuid"), ("os", "setsid"), ("os", "killpg"),
    ("os", "sched_getaffinity"), ("os", "uname"), ("os", "nice"), ("os", "statvfs"), ("signal", "pthread_sigmask"),
    ("signal", "alarm"), ("signal", "setitimer"), ("signal", "SIGKILL"), ("signal", "SIGHUP"), ("signal", "SIGUSR1"),
}  # fmt: skip
GUARDED = {  # files that ask first whether the system has what they call
    "files/locking.py": {"fcntl"},
    "commands/compare/speed.py": {"resource"},
    "experiments/local.py": {"os.setsid", "os.sched_getaffinity", "signal.pthread_sigmask"},
}


def list_unix_names(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in UNIX_ONLY)
        elif isinstance(node, ast.ImportFrom) and node.module in UNIX_ONLY:
            yield node.module
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and (node.value.id, node.attr) in UNIX_CALLS
        ):
            yield f"{node.value.id}.{node.attr}"


def test_only_guarded_places_use_what_windows_lacks():
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        if names := set(list_unix_names(path)):
            found[path.relative_to(SOURCE).as_posix()] = names
    assert found == GUARDED


BARE = """
import os, pkgutil, signal, sys
import matplotlib.figure, pandas, ray, scipy.stats, torch, transformers  # which know the real system
transformers.PreTrainedModel
for name in ("fcntl", "resource", "termios", "pwd", "grp", "triton"):
    sys.modules[name] = None
for module, names in ((os, ("fork", "setsid", "sched_getaffinity")), (signal, ("pthread_sigmask",))):
    for name in names:
        delattr(module, name)
import attnlab
for each in pkgutil.walk_packages(attnlab.__path__, "attnlab."):
    if not each.name.endswith(("_kernel", "__main__")) and ".kernels" not in each.name:
        __import__(each.name)
from pathlib import Path
from attnlab.files import write_text
write_text(Path(sys.argv[1]) / "text", "written")
assert os.listdir(sys.argv[1]) == ["text"], os.listdir(sys.argv[1])
from attnlab.commands.compare.speed import _read_resident
assert _read_resident() > 2**20
from attnlab.experiments.local import Local
assert Local(1, "cpu").context.get_start_method() == "spawn"
"""


@pytest.mark.slow
def test_all_of_attnlab_can_be_imported_without_what_windows_lacks(tmp_path):
    done = subprocess.run([sys.executable, "-c", BARE, tmp_path], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_lock_on_windows_is_a_byte_behind_the_end(tmp_path, monkeypatch):
    held: set[int] = set()

    def lock_byte(descriptor: int, mode: int, count: int) -> None:
        import os

        where = os.lseek(descriptor, 0, os.SEEK_CUR)
        assert (where, count) == (locking.FAR, 1)
        if held:
            raise OSError("locked")
        held.add(descriptor)

    monkeypatch.setattr(locking, "fcntl", None)
    monkeypatch.setattr(locking, "msvcrt", SimpleNamespace(locking=lock_byte, LK_LOCK=1, LK_NBLCK=2))
    (tmp_path / "lock").write_text("abc")
    with (tmp_path / "lock").open("r+") as one, (tmp_path / "lock").open("r+") as other:
        assert lock_file(one)
        assert not lock_file(other, shared=True)
        assert one.read() == "abc"
    held.clear()
    write_text(tmp_path / "made", "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "made"]
    monkeypatch.setattr(locking, "msvcrt", None)
    with (tmp_path / "lock").open() as file, pytest.raises(OSError, match="no locks"):
        locking.lock(file, wait=True)
