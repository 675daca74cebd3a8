"""attnlab: a laboratory for attention."""

from typing import TYPE_CHECKING, Any

from attnlab.mechanisms import MECHANISMS, Mechanism, attention
from attnlab.records.record import Record

if TYPE_CHECKING:
    from attnlab.analysis.contribution_table import contribution
    from attnlab.huggingface.pretrained import adapt, load
    from attnlab.huggingface.recorder import record
    from attnlab.reading.maps import show

__version__ = "0.1.0"
__all__ = ["MECHANISMS", "Mechanism", "Record", "adapt", "attention", "contribution", "load", "record", "show"]


def __getattr__(name: str) -> Any:
    """What needs models, and what needs transformers, is imported when it is first used."""
    if name == "contribution":
        from attnlab.analysis.contribution_table import contribution

        return contribution
    if name == "show":
        from attnlab.reading.maps import show

        return show
    if name == "record":
        from attnlab.huggingface.recorder import record

        return record
    if name in ("adapt", "load"):
        from attnlab.huggingface import pretrained

        return getattr(pretrained, name)
    raise AttributeError(f"module 'attnlab' has no attribute {name!r}")
