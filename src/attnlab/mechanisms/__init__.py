"""The registry of attention mechanisms. To add one, add a file and a line below; the laws then cover it.

Nothing here imports torch: a mechanism is imported when it is first looked up.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, get_type_hints

from attnlab.config import check_value, describe_error, parse_value, suggest_nearest
from attnlab.mechanisms import own
from attnlab.registry import Registry, import_place

if TYPE_CHECKING:
    from attnlab.mechanisms.mechanism import Mechanism

__all__ = [
    "DECIDED_BY_MODEL", "MECHANISMS", "Mechanism", "attention", "check_options", "find_mechanism", "parse_options",
    "read_option_types",
]  # fmt: skip

MECHANISMS: Registry[type[Mechanism]] = Registry(
    {
        "softmax": "attnlab.mechanisms.softmax:Softmax",
        "realformer": "attnlab.mechanisms.realformer:RealFormer",
        "coda": "attnlab.mechanisms.coda:Coda",
        "coda-cs": "attnlab.mechanisms.coda_cs:CodaCS",
        "dagpam": "attnlab.mechanisms.dagpam:DaGPAM",
        "coda+dagpam": "attnlab.mechanisms.coda_dagpam:CodaDaGPAM",
        "realformer+dagpam": "attnlab.mechanisms.realformer_dagpam:RealFormerDaGPAM",
        "nap": "attnlab.mechanisms.nap:NAP",
        "non": "attnlab.mechanisms.non:NON",
        "de-attention": "attnlab.mechanisms.de_attention:DeAttention",
        "differential": "attnlab.mechanisms.differential:Differential",
        "cog": "attnlab.mechanisms.cog:Cog",
        "shaped": "attnlab.mechanisms.shaped:Shaped",
        "sigmoid": "attnlab.mechanisms.sigmoid:Sigmoid",
        "softmax1": "attnlab.mechanisms.softmax1:Softmax1",
        "talking-heads": "attnlab.mechanisms.talking_heads:TalkingHeads",
        "entmax15": "attnlab.mechanisms.entmax15:Entmax15",
        "sparsemax": "attnlab.mechanisms.sparsemax:Sparsemax",
        "gated": "attnlab.mechanisms.gated:Gated",
        "fox": "attnlab.mechanisms.fox:FoX",
        "resformer": "attnlab.mechanisms.resformer:ResFormer",
        "dot": "attnlab.mechanisms.dot:Dot",
        "uniform": "attnlab.mechanisms.uniform:Uniform",
    }
)

DECIDED_BY_MODEL = ("layer", "dropout", "model_size")  # options that a model of ours sets itself


def attention(name: str | type[Mechanism], *, heads: int, head_dim: int, **options: Any) -> Mechanism:
    """Build a mechanism from its name, from a file and a class in it (`./mine.py:Mine`), or from its class.

    Raises ValueError for an unknown name or option, and for an option with a bad value.
    """
    kind = find_mechanism(name)
    check_options(name, options)
    try:
        return kind(heads, head_dim, **options)
    except (ValueError, TypeError) as error:
        raise ValueError(f"attention {name if isinstance(name, str) else kind.__name__}: {error}") from error
    except (Exception, SystemExit) as error:
        if kind in MECHANISMS.values():
            raise
        raise ValueError(f"{name} cannot be built: {describe_error(error)}") from error


def find_mechanism(name: str | type[Mechanism]) -> type[Mechanism]:
    """Return the class of a name. Raises ValueError if there is none."""
    if isinstance(name, type):
        return name
    if own.is_own(name):
        return own.load_mechanism(name)
    if name not in MECHANISMS:
        hint = f"{suggest_nearest(name, MECHANISMS)}; there are {', '.join(MECHANISMS)}, or ./file.py:Class"
        raise ValueError(f"no attention is called {name!r}{hint}")
    return MECHANISMS[name]


def read_option_types(name: str | type[Mechanism]) -> dict[str, Any]:
    """Return the options of a mechanism with their types: its own first, then those of every mechanism."""
    from attnlab.mechanisms.mechanism import Mechanism

    types: dict[str, Any] = {}
    for kind in find_mechanism(name).__mro__:
        if issubclass(kind, Mechanism) and "__init__" in vars(kind):
            hints = get_type_hints(kind.__init__, include_extras=True)
            for parameter in inspect.signature(kind.__init__).parameters.values():
                if parameter.kind is parameter.KEYWORD_ONLY:
                    types.setdefault(parameter.name, hints.get(parameter.name, Any))
            if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(kind.__init__).parameters.values()):
                break
    return types


def check_options(name: str | type[Mechanism], options: Any) -> None:
    """Raise ValueError for an option that the mechanism does not have, or a value out of its range."""
    known = read_option_types(name)
    for option in options:
        if option not in known:
            if not known:
                raise ValueError(f"the constructor of {name} must accept **base and pass it to super().__init__")
            hint = f"{suggest_nearest(option, known)}; it has {', '.join(known)}"
            raise ValueError(f"{name} has no option {option!r}{hint}")
        check_value(option, options[option], known[option] if name in MECHANISMS else Any)


def parse_options(name: str | type[Mechanism], values: dict[str, str]) -> dict[str, Any]:
    """Convert options from text to the types that the mechanism declares. Raises ValueError like `check_options`."""
    known = read_option_types(name)
    options = {key: parse_value(text, known[key], key) if key in known else text for key, text in values.items()}
    check_options(name, options)
    return options


def __getattr__(name: str) -> Any:
    """Import Mechanism, or the class of a registered mechanism, when it is first used."""
    places = ["attnlab.mechanisms.mechanism:Mechanism", *map(MECHANISMS.get_place, MECHANISMS)]
    for place in places:
        if place.endswith(f":{name}"):
            return import_place(place)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
