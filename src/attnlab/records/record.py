"""The second narrow waist: the Record, plain tensors of one forward pass. It contains no module.

Our models and Hugging Face models produce it; every analysis and the viewer consume it. In one attention layer

    context = Σ_j weights · values     mixed = finish(context · turning)
    outputs = Σ_h mixed_h · output_weight_h + output_bias

turning is a linear map of each query and head, as a gate is; most mechanisms have none.

A Record in memory holds its layers. A Record from a file reads each layer on access and keeps none. A lazy Record keeps
queries and keys and computes weights on access, all at once or for a range of rows.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from html import escape
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from attnlab.files import replace_file
from attnlab.files.user_files import parse_json
from attnlab.records.visibility import CausalMask, Weigh

FORMAT = "attnlab-record-1"
SHOWN = 12  # tokens and examples in a notebook
KINDS = {"encoder-self": ("source", "source"), "decoder-self": ("target", "target"), "cross": ("target", "source")}

# the parts of the block around an attention in Layer.around: e model size, f feed-forward size
AROUND = {
    "residual": "(b,i,e)  the state that the outputs are added to",
    "norm.gain": "(e,)  of the norm of that sum u: gain·scale·(u − mean u if centred else u) + bias",
    "norm.centred": "()  bool, True for a LayerNorm, False for an RMSNorm",
    "norm.scale": "(b,i,1)  1 / the deviation, or 1 / the root mean square",
    "feed_forward.inner": "(e,f)  W₁ of the feed-forward, Σ_k (x·inner_k)·slope_k·output_k + biases",
    "feed_forward.slope": "(b,i,f)",
    "feed_forward.factor": "(e,f)  W₃ of a gated one, which adds the terms (x·factor_k)·factor_slope_k·output_k",
    "feed_forward.factor_slope": "(b,i,f)",
    "feed_forward.output": "(f,e)  W₂",
    "feed_forward.pre": "()  bool: added to the sum u if True, else to the norm of u, followed by the norm closing",
    "closing.gain": "(e,)",
    "closing.centred": "()",
    "closing.scale": "(b,i,1)",
    "closing.bias": "(e,)  of the norm that reads a pre-norm block: of the next layer, or the final norm",
    "closing.input": "(b,i,e)",
}
UNBATCHED = {"output_weight", "output_bias", "weight", "bias"} | {
    f"around.{name}" for name, shape in AROUND.items() if not shape.startswith("(b,")
}


@dataclass(frozen=True, eq=False)
class Layer:
    """One attention layer of one forward pass: b examples, h heads, i queries, j keys, head size d, model size e."""

    kind: str  # a key of KINDS, which names its query and key sequences
    index: int  # its number, from 0 within its kind; the model's own where some of its layers have no attention
    name: str  # the module it came from
    attended: Tensor | Weigh  # the weights (b,h,i,j), or a function that computes them
    grouped_values: Tensor  # (b,g,j,d), each of the g for h/g consecutive heads
    context: Tensor  # (b,h,i,d)
    mixed: Tensor  # (b,h,i,d)
    output_weight: Tensor  # (h,d,e)
    output_bias: Tensor | None  # (e,)
    inputs: Tensor  # (b,i,e)  the input of the attention module on the query side
    outputs: Tensor  # (b,i,e)  the result of its output projection
    mask: Tensor | CausalMask  # bool, broadcastable to (b,1,i,j), True = visible; `see` reads rows of it
    extras: Mapping[str, Tensor] = field(default_factory=dict)  # optional logits, probes, gradients; batch first
    around: Mapping[str, Tensor] = field(default_factory=dict)  # the block around it; AROUND names the parts
    strange: str = ""  # why that block is not supported, if it is not
    turning: Tensor | None = None  # a factor (b,h,i,1) or (b,h,i,d), or a matrix (b,h,i,d,d); None: the identity

    @property
    def weights(self) -> Tensor:
        return self.rows(0, self.context.shape[2])

    @property
    def values(self) -> Tensor:
        return self.grouped_values.repeat_interleave(self.context.shape[1] // self.grouped_values.shape[1], dim=1)

    @property
    def turned_context(self) -> Tensor:
        """The context after the turning, (b,h,i,d)."""
        return self.context if self.turning is None else apply_turning(self.turning, self.context)

    @property
    def lazy(self) -> bool:
        return not isinstance(self.attended, Tensor)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the weights of queries start … stop−1, (b,h,stop−start,j)."""
        if not 0 <= start <= stop:
            raise IndexError(f"rows must start at 0 or later and stop at or after their start, got {start} to {stop}")
        return self.attended[:, :, start:stop] if isinstance(self.attended, Tensor) else self.attended(start, stop)

    def see(self, start: int, stop: int) -> Tensor:
        """Return which keys queries start … stop−1 see: bool (b|1,1,stop−start,j)."""
        if isinstance(self.mask, CausalMask):
            return self.mask.rows(start, stop)
        mask = self.mask[(None,) * (4 - self.mask.dim())]
        return mask.expand(-1, -1, self.context.shape[2], self.grouped_values.shape[2])[:, :, start:stop]

    def hides_any(self) -> bool:
        """Return whether some query does not see some key."""
        return self.mask.hides_any() if isinstance(self.mask, CausalMask) else not bool(self.mask.all())

    def chunks(self, size: int = 256) -> Iterator[tuple[slice, Tensor]]:
        """Yield ranges of at most `size` queries with their weights. Use it to read a lazy layer."""
        if size < 1:
            raise ValueError(f"size must be at least 1 query, got {size}")
        queries = self.context.shape[2]
        for start in range(0, queries, size):
            stop = min(start + size, queries)
            yield slice(start, stop), self.rows(start, stop)

    def tensors(self) -> dict[str, Tensor]:
        """Return every stored tensor by name; the weights and the mask only if they are in memory."""
        named = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        parts = {"extras": self.extras, "around": self.around}
        return named | {f"{part}.{name}": value for part, held in parts.items() for name, value in held.items()}

    def map(self, change: Callable[[str, Tensor], Tensor]) -> "Layer":
        """Return the layer with every tensor changed. Lazy weights change when they are computed."""
        changed: dict[str, Any] = {n: change(n, x) for n, x in vars(self).items() if isinstance(x, Tensor)}
        if not isinstance(weigh := self.attended, Tensor):
            changed["attended"] = lambda start, stop: change("attended", weigh(start, stop))
        if isinstance(self.mask, CausalMask):
            changed["mask"] = self.mask.to(changed["context"].device)
        extras = {name: change(name, value) for name, value in self.extras.items()}
        around = {name: change(f"around.{name}", value) for name, value in self.around.items()}
        return replace(self, extras=extras, around=around, **changed)


class LazyLayers(Sequence[Layer]):
    """Layers that are loaded one at a time on access. Their kinds and indices are known in advance."""

    def __init__(self, places: Sequence[tuple[str, int]], make: Callable[[int], Layer]) -> None:
        self.places, self.make = places, make

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, k: Any) -> Any:
        if isinstance(k, slice):
            return self.select(range(len(self))[k])
        if not -len(self) <= k < len(self):
            raise IndexError(f"layer {k} is out of range: the record has {len(self)} layers")
        return self.make(k % len(self))

    def select(self, places: Sequence[int]) -> "LazyLayers":
        """Return some of the layers, still lazy."""
        return LazyLayers([self.places[place] for place in places], lambda k: self.make(places[k]))


@dataclass(frozen=True, eq=False)
class Record:
    """The attention of a model on one batch.

    tokens   ids (b,n) of each sequence, "source" and/or "target"     masks   (b,n) bool, True = a token, not padding
    words    the same tokens as text, if there was a tokenizer        readout "hidden" (b,n,e), "weight" (vocabulary,e)
    meta     what was recorded: model, mechanism, noise seed
    """

    layers: Sequence[Layer]
    tokens: Mapping[str, Tensor] = field(default_factory=dict)
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    words: Mapping[str, list[list[str]]] = field(default_factory=dict)
    readout: Mapping[str, Tensor] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(next(iter(self.tokens.values()))) if self.tokens else len(self.layers[0].context)

    def __getitem__(self, examples: int | slice) -> "Record":
        """Return the record of some examples of the batch."""
        if isinstance(examples, int):
            if not -len(self) <= examples < len(self):
                raise IndexError(f"example {examples} is out of range: the record has {len(self)} examples")
            examples = slice(examples % len(self), examples % len(self) + 1)

        def cut(name: str, x: Tensor) -> Tensor:
            if name == "context":
                self.check_count(x)
            return x if name in UNBATCHED or (name == "mask" and (x.dim() < 4 or len(x) == 1)) else x[examples]

        return replace(self._map(cut), words={name: lines[examples] for name, lines in self.words.items()})

    def check_count(self, context: Tensor) -> None:
        """Raise ValueError if the context of a layer lacks examples of the record, as one picture for two texts."""
        if len(context) != len(self):
            raise ValueError(
                f"the record has {len(self)} examples, and a layer {len(context)}, so they cannot be told apart: "
                "record as many pictures as texts"
            )

    def to(self, device: torch.device | str) -> "Record":
        moved: dict[int, Tensor] = {}  # keeps shared tensors shared; the ids of lazy layers are not stable
        lazy = isinstance(self.layers, LazyLayers)

        def move(name: str, x: Tensor) -> Tensor:
            if lazy or name not in ("mask", "context", "mixed", "inputs", "around.residual"):
                return x.to(device)
            if id(x) not in moved:
                moved[id(x)] = x.to(device)
            return moved[id(x)]

        return self._map(move)

    @property
    def kinds(self) -> list[str]:
        """The kind of each layer, without loading it."""
        return [kind for kind, _ in self.places]

    @property
    def places(self) -> list[tuple[str, int]]:
        """The kind and the index of each layer, without loading it."""
        layers = self.layers
        return list(layers.places) if isinstance(layers, LazyLayers) else [(x.kind, x.index) for x in layers]

    def kind(self, kind: str) -> Sequence[Layer]:
        """Return the layers of one kind, in order."""
        if kind not in KINDS:
            raise ValueError(f"unknown kind of layer {kind!r}; choose one of {', '.join(KINDS)}")
        places = [place for place, other in enumerate(self.kinds) if other == kind]
        layers = self.layers
        return layers.select(places) if isinstance(layers, LazyLayers) else [layers[place] for place in places]

    def save(self, path: str | Path) -> None:
        """Write one safetensors file atomically. A tensor with several names is stored once."""
        path = Path(path)
        stored: dict[str, Tensor] = {}
        keys: dict[Any, tuple[str, Tensor]] = {}  # keeps the tensor alive, so that its memory is not reused

        def store(name: str, x: Tensor) -> dict[str, Any]:
            place = (x.device, x.data_ptr(), x.shape, x.stride(), x.dtype)
            if place not in keys:
                keys[place] = f"{len(stored):05d}.{name}", x
                once = tuple(slice(0, 1) if step == 0 else slice(None) for step in x.stride())  # shrinks expanded axes
                stored[keys[place][0]] = x[once].detach().cpu().contiguous().clone()
            key = keys[place][0]
            return {"key": key, "shape": list(x.shape), "crc32": _compute_checksum(stored[key])}

        built: dict[CausalMask, Tensor] = {}  # a file has every weight, so it may have the mask too

        def list_tensors(layer: Layer) -> dict[str, Tensor]:
            computed = {"attended": layer.weights}
            if isinstance(mask := layer.mask, CausalMask):
                computed["mask"] = built[mask] if mask in built else built.setdefault(mask, mask.build())
            return computed | layer.tensors()

        index: dict[str, Any] = {
            "layers": [
                {"kind": layer.kind, "index": layer.index, "name": layer.name, "strange": layer.strange}
                | {"tensors": {name: store(name, x) for name, x in list_tensors(layer).items()}}
                for layer in self.layers
            ],
            "words": dict(self.words),
            "meta": dict(self.meta),
        }
        for part in ("tokens", "masks", "readout"):
            index[part] = {name: store(name, x) for name, x in getattr(self, part).items()}
        index["crc32"] = zlib.crc32(json.dumps(index).encode())
        with replace_file(path) as scratch:
            save_file(stored, scratch, metadata={FORMAT: json.dumps(index)})  # one entry: their order is not fixed

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> "Record":
        """Open a saved record. Each layer is read on access. Raises ValueError if the file is not a Record."""
        if Path(path).is_dir():
            raise ValueError(f"{path} is a folder; a record is a .safetensors file")
        try:
            file = safe_open(path, "pt", device=str(device))  # stays open: another file may replace it
        except FileNotFoundError:
            raise FileNotFoundError(f"no record at {path}") from None
        except SafetensorError as error:
            raise ValueError(f"{path} is not a safetensors file or is damaged: {error}") from None
        about = file.metadata() or {}
        if FORMAT not in about:
            raise ValueError(f"{path} is a safetensors file but not a Record (format {FORMAT})")
        index = parse_json(about[FORMAT], f"the index of {path}")
        try:
            _check_index(index, {key: file.get_slice(key).get_shape() for key in file.keys()})  # noqa: SIM118 (no dict)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            problem = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path} is a damaged Record: {problem}; record it again") from None

        def read_tensors(entries: Mapping[str, Any]) -> dict[str, Tensor]:
            stored = {key: file.get_tensor(key) for key in {e["key"] for e in entries.values()}}
            for key, checksum in {e["key"]: e["crc32"] for e in entries.values() if "crc32" in e}.items():
                if _compute_checksum(stored[key]) != checksum:
                    raise ValueError(f"{path} is a damaged Record: tensor {key} was changed; record it again")
            return {name: stored[e["key"]].expand(e["shape"]) for name, e in entries.items()}

        def read_layer(k: int) -> Layer:
            about = index["layers"][k]
            tensors: dict[str, Any] = {"output_bias": None} | read_tensors(about["tensors"])
            for part in ("extras", "around"):
                names = [name for name in tensors if name.startswith(f"{part}.")]
                tensors[part] = {name.removeprefix(f"{part}."): tensors.pop(name) for name in names}
            return Layer(about["kind"], about["index"], about["name"], **tensors, strange=about.get("strange", ""))

        parts = {part: read_tensors(index[part]) for part in ("tokens", "masks", "readout")}
        layers = LazyLayers([(about["kind"], about["index"]) for about in index["layers"]], read_layer)
        return cls(layers, words=index["words"], meta=index["meta"], **parts)

    def __repr__(self) -> str:
        return f"Record({len(self)} examples; layers: {self._count_layers()}; {dict(self.meta)})"

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows: layers by kind, and the first tokens of each example."""
        rows = [("examples", len(self)), ("layers", self._count_layers()), *self.meta.items()]
        for side, lines in self.words.items():
            rows += [(f"{side} {number}", " ".join(line[:SHOWN])) for number, line in enumerate(lines[:SHOWN])]
        cells = "".join(f"<tr><th>{escape(str(name))}</th><td>{escape(str(x))}</td></tr>" for name, x in rows)
        return f"<table><caption>Record</caption>{cells}</table>"

    def _count_layers(self) -> str:
        return ", ".join(f"{self.kinds.count(kind)} {kind}" for kind in KINDS if kind in self.kinds) or "none"

    def _map(self, change: Callable[[str, Tensor], Tensor]) -> "Record":
        if isinstance(layers := self.layers, LazyLayers):
            changed: Sequence[Layer] = LazyLayers(layers.places, lambda k: layers[k].map(change))
        else:
            changed = [layer.map(change) for layer in layers]
        tokens, masks, readout = (
            {name: change(name, x) for name, x in part.items()} for part in (self.tokens, self.masks, self.readout)
        )
        return replace(self, layers=changed, tokens=tokens, masks=masks, readout=readout)


def apply_turning(turning: Tensor, context: Tensor) -> Tensor:
    """Apply the map of each query, a factor (b,h,i,1|d) or a matrix (b,h,i,d,d), to its context (b,h,i,d)."""
    return (context.unsqueeze(-2) @ turning).squeeze(-2) if turning.dim() == 5 else turning * context


def turn_values(turning: Tensor, values: Tensor) -> Tensor:
    """Apply the maps of some queries, (b,h,i,1|d) or (b,h,i,d,d), to every value (b,h,j,d): (b,h,i,j,d)."""
    values = values.unsqueeze(2)
    return values @ turning if turning.dim() == 5 else values * turning.unsqueeze(3)


def _compute_checksum(x: Tensor) -> int:
    """Return the CRC-32 of a tensor's type, shape and content."""
    content = x.cpu().reshape(-1).view(torch.uint8).numpy().data
    return zlib.crc32(content, zlib.crc32(f"{x.dtype} {tuple(x.shape)}".encode()))


def _check_index(index: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise an error if the index of a file lacks a part, or names a tensor that is missing or has another shape."""
    optional = {"kind", "index", "name", "output_bias", "extras", "around", "strange", "turning"}
    required = [each.name for each in fields(Layer) if each.name not in optional]
    content = {key: x for key, x in index.items() if key != "crc32"}
    if "crc32" in index and index["crc32"] != zlib.crc32(json.dumps(content).encode()):
        raise ValueError("its index was changed")
    for layer in index["layers"]:
        if layer["kind"] not in KINDS or not isinstance(layer["index"], int) or not isinstance(layer["name"], str):
            raise ValueError(f"layer {layer['name']!r} has an unknown kind or index")
        for name in required:
            layer["tensors"][name]
        if "turning" in layer["tensors"]:
            turning, context = (tuple(layer["tensors"][name]["shape"]) for name in ("turning", "context"))
            if turning not in ((*context[:3], 1), context, (*context, *context[3:])):
                raise ValueError(f"the turning of {layer['name']!r} has the shape {turning}, but its context {context}")
    parts = [index["tokens"], index["masks"], index["readout"], *(layer["tensors"] for layer in index["layers"])]
    entries = [entry for part in parts for entry in part.values()]
    if unknown := sorted(set(shapes) - {entry["key"] for entry in entries}):
        raise ValueError(f"tensor {unknown[0]} belongs to no layer")
    for entry in entries:
        stored, shape = shapes[entry["key"]], entry["shape"]
        if len(stored) != len(shape) or any(n not in (1, m) for n, m in zip(stored, shape, strict=True)):
            raise ValueError(f"tensor {entry['key']} has the shape {list(stored)}, expected {shape}")
    if not isinstance(index["words"], dict) or not isinstance(index["meta"], dict):
        raise ValueError("its words or meta have no names")
