"""attnlab: a laboratory for attention."""

from typing import TYPE_CHECKING, Any

from attnlab.mechanisms import MECHANISMS, Mechanism, attention
from attnlab.recording import Record

if TYPE_CHECKING:
    from attnlab.analysis.pairs import contribution
    from attnlab.inspection.viewing import show
    from attnlab.models.pretrained import adapt, load
    from attnlab.models.watch import record

__version__ = "0.1.0"
__all__ = ["MECHANISMS", "Mechanism", "Record", "adapt", "attention", "contribution", "load", "record", "show"]


def __getattr__(name: str) -> Any:
    """What needs models, and what needs transformers, is imported when it is first used."""
    if name == "contribution":
        from attnlab.analysis.pairs import contribution

        return contribution
    if name == "show":
        from attnlab.inspection.viewing import show

        return show
    if name == "record":
        from attnlab.models.watch import record

        return record
    if name in ("adapt", "load"):
        from attnlab.models import pretrained

        return getattr(pretrained, name)
    raise AttributeError(f"module 'attnlab' has no attribute {name!r}")
