"""attnlab: a laboratory for attention."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnlab.analysis.contribution_table import contribution
    from attnlab.decoding.generation import generate
    from attnlab.huggingface.intervening import intervene
    from attnlab.huggingface.pretrained import adapt, load
    from attnlab.huggingface.recorder import record
    from attnlab.mechanisms import MECHANISMS, Mechanism, attention
    from attnlab.reading.maps import show
    from attnlab.records.record import Record

__version__ = "0.2.0"  # the only place; CITATION.cff repeats it, which a test compares
__all__ = [
    "MECHANISMS",
    "Mechanism",
    "Record",
    "adapt",
    "attention",
    "contribution",
    "generate",
    "intervene",
    "load",
    "record",
    "show",
]

_PLACES = {  # of the public names; torch and transformers are imported when a name that needs them is first used
    "MECHANISMS": "attnlab.mechanisms:MECHANISMS",
    "Mechanism": "attnlab.mechanisms.mechanism:Mechanism",
    "Record": "attnlab.records.record:Record",
    "adapt": "attnlab.huggingface.pretrained:adapt",
    "attention": "attnlab.mechanisms:attention",
    "contribution": "attnlab.analysis.contribution_table:contribution",
    "generate": "attnlab.decoding.generation:generate",
    "intervene": "attnlab.huggingface.intervening:intervene",
    "load": "attnlab.huggingface.pretrained:load",
    "record": "attnlab.huggingface.recorder:record",
    "show": "attnlab.reading.maps:show",
}


if not TYPE_CHECKING:  # type checkers and editors read the imports above

    def __getattr__(name: str) -> Any:
        if name not in _PLACES:
            raise AttributeError(f"module 'attnlab' has no attribute {name!r}")
        from attnlab.registry import import_place

        return import_place(_PLACES[name])


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
