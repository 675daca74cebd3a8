"""The registry of attention mechanisms. To add one, add a file and a line below; the laws then cover it."""

import inspect
from typing import Any, get_type_hints

from attnlab.config import parse_value, suggest_nearest
from attnlab.mechanisms import own
from attnlab.mechanisms.coda import Coda
from attnlab.mechanisms.coda_cs import CodaCS
from attnlab.mechanisms.coda_dagpam import CodaDaGPAM
from attnlab.mechanisms.cog import Cog
from attnlab.mechanisms.dagpam import DaGPAM
from attnlab.mechanisms.de_attention import DeAttention
from attnlab.mechanisms.differential import Differential
from attnlab.mechanisms.dot import Dot
from attnlab.mechanisms.entmax15 import Entmax15
from attnlab.mechanisms.mechanism import Mechanism
from attnlab.mechanisms.nap import NAP
from attnlab.mechanisms.non import NON
from attnlab.mechanisms.realformer import RealFormer
from attnlab.mechanisms.realformer_dagpam import RealFormerDaGPAM
from attnlab.mechanisms.shaped import Shaped
from attnlab.mechanisms.sigmoid import Sigmoid
from attnlab.mechanisms.softmax import Softmax
from attnlab.mechanisms.softmax1 import Softmax1
from attnlab.mechanisms.sparsemax import Sparsemax
from attnlab.mechanisms.talking_heads import TalkingHeads
from attnlab.mechanisms.uniform import Uniform

__all__ = [
    "MECHANISMS", "Mechanism", "attention", "check_options", "find_mechanism", "parse_options", "read_option_types",
]  # fmt: skip

MECHANISMS: dict[str, type[Mechanism]] = {
    "softmax": Softmax,
    "realformer": RealFormer,
    "coda": Coda,
    "coda-cs": CodaCS,
    "dagpam": DaGPAM,
    "coda+dagpam": CodaDaGPAM,
    "realformer+dagpam": RealFormerDaGPAM,
    "nap": NAP,
    "non": NON,
    "de-attention": DeAttention,
    "differential": Differential,
    "cog": Cog,
    "shaped": Shaped,
    "sigmoid": Sigmoid,
    "softmax1": Softmax1,
    "talking-heads": TalkingHeads,
    "entmax15": Entmax15,
    "sparsemax": Sparsemax,
    "dot": Dot,
    "uniform": Uniform,
}


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
    except Exception as error:
        if kind in MECHANISMS.values():
            raise
        raise ValueError(f"{name} cannot be built: {type(error).__name__}: {error}") from error


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
    types: dict[str, Any] = {}
    for kind in find_mechanism(name).__mro__:
        if issubclass(kind, Mechanism) and "__init__" in vars(kind):
            hints = get_type_hints(kind.__init__)
            for parameter in inspect.signature(kind.__init__).parameters.values():
                if parameter.kind is parameter.KEYWORD_ONLY:
                    types.setdefault(parameter.name, hints.get(parameter.name, Any))
            if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(kind.__init__).parameters.values()):
                break
    return types


def check_options(name: str | type[Mechanism], options: Any) -> None:
    """Raise ValueError for an option that the mechanism does not have; the message suggests the nearest."""
    known = read_option_types(name)
    for option in options:
        if option not in known:
            if not known:
                raise ValueError(f"the constructor of {name} must accept **base and pass it to super().__init__")
            hint = f"{suggest_nearest(option, known)}; it has {', '.join(known)}"
            raise ValueError(f"{name} has no option {option!r}{hint}")


def parse_options(name: str | type[Mechanism], values: dict[str, str]) -> dict[str, Any]:
    """Convert options from text to the types that the mechanism declares."""
    check_options(name, values)
    known = read_option_types(name)
    return {key: parse_value(text, known[key], key) for key, text in values.items()}
