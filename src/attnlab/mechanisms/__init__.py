"""The registry of attention mechanisms. To add one, add a file and a line below; the laws then cover it.

Nothing here imports torch: a mechanism is imported when it is first looked up.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_type_hints

from attnlab.config import check_value, describe_error, parse_value, suggest_nearest
from attnlab.mechanisms.per_layer import check_carries, is_per_layer, list_names, split_layers
from attnlab.registry import Registry, import_place, own_files

if TYPE_CHECKING:
    from attnlab.mechanisms.mechanism import Mechanism

__all__ = [
    "DECIDED_BY_MODEL",
    "MECHANISMS",
    "Mechanism",
    "attention",
    "check_options",
    "choose_attentions",
    "describe_owner",
    "find_mechanism",
    "find_mechanisms",
    "parse_options",
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
        "softpick": "attnlab.mechanisms.softpick:Softpick",
        "stick-breaking": "attnlab.mechanisms.stick_breaking:StickBreaking",
        "ssmax": "attnlab.mechanisms.ssmax:SSMax",
        "sink": "attnlab.mechanisms.sink:Sink",
        "sliding-window": "attnlab.mechanisms.sliding_window:SlidingWindow",
        "alibi": "attnlab.mechanisms.alibi:ALiBi",
        "cosine": "attnlab.mechanisms.cosine:Cosine",
        "gated": "attnlab.mechanisms.gated:Gated",
        "fox": "attnlab.mechanisms.fox:FoX",
        "resformer": "attnlab.mechanisms.resformer:ResFormer",
        "differential-v2": "attnlab.mechanisms.differential_v2:DifferentialV2",
        "xsa": "attnlab.mechanisms.xsa:XSA",
        "value-gated": "attnlab.mechanisms.value_gated:ValueGated",
        "knocking-heads": "attnlab.mechanisms.knocking_heads:KnockingHeads",
        "dcmha": "attnlab.mechanisms.dcmha:DCMHA",
        "multi-token": "attnlab.mechanisms.multi_token:MultiToken",
        "selective": "attnlab.mechanisms.selective:Selective",
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
    if is_per_layer(name):
        raise ValueError(f"{name} describes the layers of a model; one mechanism is needed here, by its name alone")
    if own_files.is_own(name):
        from attnlab.mechanisms.mechanism import Mechanism

        return own_files.load_class(name, Mechanism)  # type: ignore[type-abstract]
    if name not in MECHANISMS:
        hint = f"{suggest_nearest(name, MECHANISMS)}; there are {', '.join(MECHANISMS)}, or ./file.py:Class"
        raise ValueError(f"no attention is called {name!r}{hint}")
    return MECHANISMS[name]


def find_mechanisms(name: str | type[Mechanism]) -> list[type[Mechanism]]:
    """Return the classes of a name, or of the names in a per-layer text. Raises ValueError if there is none."""
    if not isinstance(name, str | type):
        example = "a name, a class, or a text for all layers such as 'softmax*3,gated'"
        raise TypeError(f"an attention must be {example}, got a {type(name).__name__}")
    return [find_mechanism(each) for each in ([name] if isinstance(name, type) else list_names(name))]


def choose_attentions(
    text: str | type[Mechanism],
    options: Mapping[str, Any],
    layers: int,
    *,
    where: str = "the model",
    decided: Sequence[str] = DECIDED_BY_MODEL,
) -> list[tuple[str | type[Mechanism], dict[str, Any]]]:
    """Return the name and the options of the attention of each layer.

    text      a name, a class, or the text of `per_layer`, whose options in parentheses come before `options`
    where     what has the layers, for errors
    decided   options that the model decides

    Raises ValueError for a text that does not fill the layers, for a bad option, and for a carry between unlike layers.
    """
    if given := [key for key in decided if key in options]:
        raise ValueError(f"attention={text} takes {given[0]} from the model; leave {given[0]}= out")
    if isinstance(text, type) or not is_per_layer(text):
        return [(text, dict(options))] * layers
    chosen = split_layers(text, layers, where)
    for one in chosen:
        if given := [key for key in decided if key in one.options]:
            raise ValueError(f"attention={text}: {one.name} takes {given[0]} from the model; leave {given[0]}= out")
    check_carries(text, chosen, find_mechanism)
    return [(one.name, {**options, **parse_options(one.name, dict(one.options))}) for one in chosen]


def read_option_types(name: str | type[Mechanism]) -> dict[str, Any]:
    """Return the options of a mechanism with their types: its own first, then those of every mechanism.

    Of a per-layer text, these are the options that all its mechanisms have.
    """
    from attnlab.mechanisms.mechanism import Mechanism

    if isinstance(name, str) and is_per_layer(name):
        each = [read_option_types(kind) for kind in list_names(name)]
        return {key: hint for key, hint in each[0].items() if all(key in other for other in each)}
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
            if problem := describe_owner(name, option):
                raise ValueError(problem)
            if not known:
                raise ValueError(f"the constructor of {name} must accept **base and pass it to super().__init__")
            hint = f"{suggest_nearest(option, known)}; it has {', '.join(known)}"
            raise ValueError(f"{name} has no option {option!r}{hint}")
        check_value(option, options[option], known[option] if name in MECHANISMS else Any)


def describe_owner(name: str | type[Mechanism], option: str) -> str:
    """Say which attention of a per-layer text has an option that others lack; an empty text if none has it."""
    names = list_names(name) if isinstance(name, str) and is_per_layer(name) else ()
    owner = next((each for each in names if option in read_option_types(each)), None)
    return f"{option} is an option of one attention of {name}: write {owner}({option}=…) in it" if owner else ""


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
