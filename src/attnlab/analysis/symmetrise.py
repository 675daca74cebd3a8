"""Merge the two directional alignments of a sentence pair into one (Och & Ney 2003; Koehn, Och & Marcu 2003).

Links are pairs (source position, target position), from 0, in both alignments. Reverse the links of the backward model
first.

    intersection          links in both                     union    links in either
    grow-diag-final-and   start from the intersection; add links of the union that touch a chosen link (also
                          diagonally) and have a word without a link; then, for each direction in turn, add links
                          whose words both have no link
"""

from collections.abc import Callable, Iterable

Link = tuple[int, int]
Links = frozenset[Link]

NEIGHBOURS = ((0, -1), (-1, 0), (0, 1), (1, 0), (-1, -1), (1, -1), (-1, 1), (1, 1))  # (source, target), in Moses' order


def intersection(forward: Iterable[Link], backward: Iterable[Link]) -> Links:
    """Return the links in both alignments: few, mostly right."""
    return frozenset(forward) & frozenset(backward)


def union(forward: Iterable[Link], backward: Iterable[Link]) -> Links:
    """Return the links in either alignment: many, fewer of them right."""
    return frozenset(forward) | frozenset(backward)


def grow_diag_final_and(forward: Iterable[Link], backward: Iterable[Link]) -> Links:
    """Grow from the intersection towards the union. The result can depend on the order, which is that of Moses."""
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
    "intersection": intersection, "union": union, "grow-diag-final-and": grow_diag_final_and,
}  # fmt: skip
