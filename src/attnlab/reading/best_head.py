"""Find the head of the cross attention that aligns words best, given gold alignments."""

from collections import defaultdict
from collections.abc import Sequence

import torch

from attnlab.analysis.alignment import choose_words, compute_rate, count_links
from attnlab.report.view import Best, Frame, ViewExample

Links = set[tuple[int, int]]
WHY = "lowest AER by weight on these examples"


def find_best_head(examples: Sequence[ViewExample], frames: Sequence[Frame]) -> Best | None:
    """Return the head with the lowest AER by weight at the last frame over all examples with gold alignments.

    Return None if there is no choice, or if some frame does not show the head.
    """
    proposed: dict[tuple[int, int], list[Links]] = defaultdict(list)  # links of each example, by layer and head
    gold = [example.gold for example in examples]
    used: dict[int, None] = {}
    for attention in frames[-1].attentions:
        true = gold[attention.example]
        if true is None or attention.kind != "cross" or attention.index is None or not attention.heads:
            continue
        used[attention.example] = None
        h = len(attention.heads)
        rows, keys = (torch.tensor(places).expand(h, -1) for places in (true.rows, true.keys))
        choice, _ = choose_words(attention.maps["weight"], rows, keys, true.words)  # (h,I)
        for head, sources in zip(attention.heads, choice.tolist(), strict=True):
            links = {(source, target) for target, source in enumerate(sources) if source >= 0}
            proposed[attention.index, head].append(links)
    sure, possible = ([getattr(gold[n], name) for n in used] for name in ("sure", "possible"))
    counts = {place: count_links(links, sure, possible) for place, links in proposed.items()}
    has_links = {place: count for place, count in counts.items() if count[:, :2].any()}  # proposed or sure ones
    rates = {place: compute_rate("aer", count) for place, count in has_links.items()}
    if len(rates) < 2:
        return None
    best = Best("cross", *min(rates, key=lambda place: rates[place]), WHY)
    return best if all(frame.has(best) for frame in frames) else None
