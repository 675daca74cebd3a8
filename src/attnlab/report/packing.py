"""A View as JSON, and back: maps in 8 bits, compressed, so that a page with every head of a BERT fits into an email.

A map (h,i,j) becomes one byte for each number, with one scale for each row, the row's largest size s:

    number = s · (c / levels)^power        c = 0 … levels; for a signed map −levels … levels
    power 2   steps are finest near 0      power 1   steps are equal

So a shown number is within half a step of the true one: (s/levels)/2 for power 1, and for power 2

    |shown − true| ≤ √(s·true)/levels + s/(4·levels²)

With 255 levels this is below 1 % of every number above 0.16 s. A row of equal numbers is exact. Maps get the finest
steps of LADDER that fit the budget; the largest map becomes coarser first. The document names the steps of each map.

docs/viewer.md describes the document (format attnlab-view-1). Arrays are deflated (zlib), then encoded in base64.
"""

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnlab.records.record import KINDS
from attnlab.report.view import (
    KIND_NAMES,
    MEASURES,
    STATISTICS,
    Best,
    Frame,
    View,
    ViewAttention,
    ViewExample,
    ViewGold,
    ViewRun,
    ViewSide,
)

FORMAT = "attnlab-view-1"
LADDER = ((255, 2), (127, 2), (255, 1), (127, 1), (63, 1), (31, 1), (15, 1))  # levels and power, finest first
SIGNED_LADDER = ((127, 2), (127, 1), (63, 1), (31, 1), (15, 1))
SAMPLED = 64  # rows of a map that are compressed to estimate its size
FIXED, PER_CELL = 1_300_000, 0.515  # bytes of a document, and bytes for each of its numbers


def _pack_curve(xs: Sequence[float], ys: Sequence[float]) -> list[list[float]]:
    """Keep the finite points of a curve, because JSON has no NaN."""
    points = [(float(x), float(y)) for x, y in zip(xs, ys, strict=True) if math.isfinite(x) and math.isfinite(y)]
    return [[x for x, _ in points], [y for _, y in points]]


def pack_view(view: View, *, budget: int | None = None) -> dict[str, Any]:
    """Pack a View as a document; `budget` limits the bytes of its maps, default 1.3 MB and 0.515 for each number."""
    blocks: list[PackedBlock] = []
    masks: dict[bytes, int] = {}
    runs = [
        {
            "name": run.name,
            "curves": {name: _pack_curve(*line) for name, line in run.curves.items()},
            "best": None if run.best is None else asdict(run.best),
            "frames": [_pack_frame(frame, blocks, masks, run.name) for frame in run.frames],
        }
        for run in view.runs
    ]
    _fit_budget(blocks, int(FIXED + PER_CELL * view.cells) if budget is None else budget)
    for block in blocks:
        block.place.update(block.build_entry())
    return {
        "format": FORMAT, "title": view.title, "notes": list(view.notes), "measures": MEASURES,
        "statistics": STATISTICS, "kinds": KINDS, "kind_names": KIND_NAMES,
        "masks": [json.loads(mask) for mask in masks],
        "examples": [_pack_example(example) for example in view.examples], "example": view.example, "runs": runs,
    }  # fmt: skip


def unpack_view(document: Mapping[str, Any]) -> View:
    """Read a document back as a View, with its rounded numbers. Raises ValueError for another format."""
    found = document.get("format") if isinstance(document, Mapping) else type(document).__name__
    if found != FORMAT:
        raise ValueError(f"the document is not a view: its format is {found!r}, expected {FORMAT!r}")
    masks = [_unpack_array(mask, np.uint8) > 0 for mask in document["masks"]]
    examples = [_unpack_example(example) for example in document["examples"]]
    runs = [_unpack_run(run, masks) for run in document["runs"]]
    return View(document["title"], examples, runs, document["notes"], document.get("example", 0))


def quantise_map(x: Tensor, levels: int, power: int, *, signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Quantise a map to codes (…,i,j), int8 if signed, else uint8, and scales (…,i), float32."""
    numbers = x.detach().float().cpu().numpy()
    scales = np.abs(numbers).max(-1, initial=0.0).astype(np.float32)
    share = np.abs(numbers) / np.where(scales > 0, scales, 1.0)[..., None]
    size = np.rint((np.sqrt(share) if power == 2 else share) * levels)
    return np.copysign(size, numbers).astype(np.int8) if signed else size.astype(np.uint8), scales


def restore_map(codes: np.ndarray, scales: np.ndarray, levels: int, power: int) -> Tensor:
    """Restore a map from the result of `quantise_map`."""
    size = codes.astype(np.float32) / np.float32(levels)
    return torch.from_numpy(np.sign(size) * np.abs(size) ** power * scales[..., None])


@dataclass(eq=False)
class PackedBlock:
    """A map to pack, with the step that it has now."""

    map: Tensor  # (h,i,j)
    place: dict[str, Any]  # the entry of the document to fill
    rung: int = 0
    size: float = 0.0  # bytes in the document, estimated until it is compressed

    def __post_init__(self) -> None:
        self.signed = bool((self.map < 0).any())
        self.ladder = SIGNED_LADDER if self.signed else LADDER
        self.estimate()

    def estimate(self) -> None:
        """Estimate the size from a sample of the rows."""
        self.compress(1 + self.map.shape[1] // SAMPLED)

    def compress(self, every: int = 1) -> None:
        """Compress the rows, or one of `every` rows."""
        codes, scales = quantise_map(self.map[:, ::every], *self.ladder[self.rung], signed=self.signed)
        self.codes, self.scales = zlib.compress(codes.tobytes(), 6), zlib.compress(scales.astype("<f4").tobytes(), 6)
        self.size = every * (len(self.codes) + len(self.scales)) * 4 / 3

    def coarsen(self) -> bool:
        """Use coarser steps until the map gets smaller. Returns whether it did."""
        before = self.size
        while self.rung + 1 < len(self.ladder) and self.size >= before:
            self.rung += 1
            self.estimate()
        return self.size < before

    def build_entry(self) -> dict[str, Any]:
        levels, power = self.ladder[self.rung]
        about = {"shape": list(self.map.shape), "signed": self.signed, "levels": levels, "power": power}
        return about | {"codes": _encode(self.codes), "scales": _encode(self.scales)}


def _fit_budget(blocks: list[PackedBlock], budget: int) -> None:
    """Coarsen the largest map repeatedly until all maps fit, or until none can be coarser.

    A map that is large after compression has flat rows. Their scales are small, and so are their steps.
    """
    candidates = list(blocks)

    def coarsen_largest() -> PackedBlock:
        largest = max(candidates, key=lambda block: block.size)
        if not largest.coarsen():
            candidates.remove(largest)
        return largest

    def is_too_large() -> bool:
        return bool(candidates) and sum(block.size for block in blocks) > budget

    while is_too_large():
        coarsen_largest()
    for block in blocks:
        block.compress()
    while is_too_large():  # an estimate was too low
        coarsen_largest().compress()


def _pack_frame(frame: Frame, blocks: list[PackedBlock], masks: dict[bytes, int], run: str) -> dict[str, Any]:
    return {"step": frame.step, "attentions": [_pack_attention(a, blocks, masks, run) for a in frame.attentions]}


def _pack_attention(
    attention: ViewAttention, blocks: list[PackedBlock], masks: dict[bytes, int], run: str
) -> dict[str, Any]:
    maps: dict[str, dict[str, Any]] = {}
    for name, x in attention.maps.items():
        if not bool(torch.isfinite(x).all()):
            where = f"run {run!r}, {attention.kind} layer {attention.index}"
            raise ValueError(f"{where}: its {name} has values that are not finite, so it has no colours")
        maps[name] = {}
        blocks.append(PackedBlock(x, maps[name]))
    mask = None
    if attention.mask is not None and not bool(attention.mask.all()):
        shown = json.dumps(_pack_array(attention.mask.cpu().numpy().astype(np.uint8))).encode()
        mask = masks.setdefault(shown, len(masks))
    vector = None if attention.vector is None else _pack_array(attention.vector.float().cpu().numpy().astype("<f4"))
    statistics = {name: [float(x) for x in values] for name, values in attention.statistics.items()}
    return {
        "example": attention.example, "kind": attention.kind, "index": attention.index, "heads": list(attention.heads),
        "mask": mask, "statistics": statistics, "vector": vector, "maps": maps,
    }  # fmt: skip


def _unpack_run(stored: Mapping[str, Any], masks: list[np.ndarray]) -> ViewRun:
    frames = [Frame([_unpack_attention(a, masks) for a in x["attentions"]], x["step"]) for x in stored["frames"]]
    curves = {name: (xs, ys) for name, (xs, ys) in stored["curves"].items()}
    return ViewRun(stored["name"], frames, curves, Best(**stored["best"]) if stored.get("best") else None)


def _unpack_attention(stored: Mapping[str, Any], masks: list[np.ndarray]) -> ViewAttention:
    maps = {}
    for name, block in stored["maps"].items():
        h, i, j = block["shape"]
        codes = _unpack_array({"shape": [h, i, j], "data": block["codes"]}, np.int8 if block["signed"] else np.uint8)
        scales = _unpack_array({"shape": [h, i], "data": block["scales"]}, np.dtype("<f4"))
        maps[name] = restore_map(codes, scales, block["levels"], block["power"])
    vector = stored["vector"]
    vector = None if vector is None else torch.from_numpy(_unpack_array(vector, np.dtype("<f4")).copy())
    mask = None if stored["mask"] is None else torch.from_numpy(masks[stored["mask"]].copy())
    where = stored["example"], stored["kind"], stored["index"], tuple(stored["heads"])
    return ViewAttention(*where, maps, vector, mask, stored["statistics"])


def _pack_example(example: ViewExample) -> dict[str, Any]:
    packed = asdict(example)
    if example.gold is not None:
        packed["gold"] |= {"sure": sorted(example.gold.sure), "possible": sorted(example.gold.possible)}
    return packed


def _unpack_example(stored: Mapping[str, Any]) -> ViewExample:
    sides = {name: ViewSide(**{part: tuple(x) for part, x in side.items()}) for name, side in stored["sides"].items()}
    gold = stored["gold"]
    if gold is None:
        return ViewExample(stored["name"], sides)
    sure, possible = (frozenset((int(s), int(t)) for s, t in gold[name]) for name in ("sure", "possible"))
    links = ViewGold(sure, possible, tuple(gold["rows"]), tuple(gold["keys"]), gold["words"])
    return ViewExample(stored["name"], sides, links)


def _pack_array(x: np.ndarray) -> dict[str, Any]:
    return {"shape": list(x.shape), "data": _encode(zlib.compress(x.tobytes(), 6))}


def _unpack_array(stored: Mapping[str, Any], dtype: Any) -> np.ndarray:
    numbers = np.frombuffer(zlib.decompress(base64.b64decode(stored["data"])), dtype=dtype)
    return numbers.reshape(stored["shape"])


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()
