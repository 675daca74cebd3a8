"""Two directional alignments of one sentence pair become one (Och & Ney 2003; Koehn, Och & Marcu 2003).

Links are pairs (source place, target place), from 0, in both alignments: turn those of the reverse model round first.

    intersection          what both say                     union    what either says
    grow-diag-final-and   from the intersection, take in links of the union that touch one already taken (also at a
                          corner) and have a word without a link; then, of either direction in turn, links whose words
                          both have none
"""

from collections.abc import Callable, Iterable

Link = tuple[int, int]
Links = frozenset[Link]

NEIGHBOURS = ((0, -1), (-1, 0), (0, 1), (1, 0), (-1, -1), (1, -1), (-1, 1), (1, 1))  # (source, target), in Moses' order


def intersection(forward: Iterable[Link], backward: Iterable[Link]) -> Links:
    """What both say: few links, mostly right."""
    return frozenset(forward) & frozenset(backward)


def union(forward: Iterable[Link], backward: Iterable[Link]) -> Links:
    """What either says: many links, fewer of them right."""
    return frozenset(forward) | frozenset(backward)


def grow_diag_final_and(forward: Iterable[Link], backward: Iterable[Link]) -> Links:
    """Between the two. Links are looked at in Moses' order, target by target, on which the result can depend."""
    directions = [sorted(set(links), key=_by_target) for links in (forward, backward)]
    either, taken = union(*directions), set(intersection(*directions))
    sources, targets = {s for s, _ in taken}, {t for _, t in taken}

    def take(link: Link) -> None:
        taken.add(link)
        sources.add(link[0])
        targets.add(link[1])

    grown = True
    while grown:
        grown = False
        for s, t in sorted(either, key=_by_target):
            if (s, t) not in taken:
                continue
            for near in ((s + across, t + down) for across, down in NEIGHBOURS):
                if near in either and near not in taken and (near[0] not in sources or near[1] not in targets):
                    take(near)
                    grown = True
    for links in directions:
        for link in links:
            if link[0] not in sources and link[1] not in targets:
                take(link)
    return frozenset(taken)


def _by_target(link: Link) -> Link:
    return link[1], link[0]


SYMMETRISATIONS: dict[str, Callable[[Iterable[Link], Iterable[Link]], Links]] = {
    "intersection": intersection,
    "union": union,
    "grow-diag-final-and": grow_diag_final_and,
}
