"""Symmetrised links, worked out by hand."""

import pytest
from properties import given, st

from attnlab.analysis.symmetrise import SYMMETRISATIONS, grow_diag_final_and, intersection, union

LINKS = st.frozensets(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=12)


def test_what_both_and_what_either_says():
    forward, backward = {(0, 0), (1, 1), (2, 3)}, {(0, 0), (2, 3), (4, 4)}
    assert intersection(forward, backward) == {(0, 0), (2, 3)}
    assert union(forward, backward) == {(0, 0), (1, 1), (2, 3), (4, 4)}


@pytest.mark.parametrize(
    ("forward", "backward", "merged"),
    [
        # (0,1) touches (0,0) and target 1 is free: taken; then (1,1) touches (0,1) and source 1 is free: taken
        ({(0, 0), (0, 1)}, {(0, 0), (1, 1)}, {(0, 0), (0, 1), (1, 1)}),
        # (1,1) touches at the corner
        ({(0, 0), (1, 1)}, {(0, 0)}, {(0, 0), (1, 1)}),
        # (0,2) touches nothing, and its source is linked: left out; (3,3) touches nothing, but both words are free
        ({(0, 0), (0, 2)}, {(0, 0), (3, 3)}, {(0, 0), (3, 3)}),
        # (1,0) and (0,1) touch both corners; when all four words are linked neither is taken
        ({(0, 0), (1, 1), (1, 0)}, {(0, 0), (1, 1), (0, 1)}, {(0, 0), (1, 1)}),
        # nothing in common: what the forward direction says comes first and takes source 2
        ({(2, 5)}, {(2, 1)}, {(2, 5)}),
        # (1,1) touches (0,2) at a corner and takes source 1; (1,3) touches it too, and target 3 is still free
        ({(0, 2), (1, 1), (1, 3)}, {(0, 2)}, {(0, 2), (1, 1), (1, 3)}),
        (set(), set(), set()),
    ],
)
def test_grow_diag_final_and_by_hand(forward, backward, merged):
    assert grow_diag_final_and(forward, backward) == merged


@given(LINKS, LINKS)
def test_every_symmetrisation_lies_between_intersection_and_union(forward, backward):
    for symmetrise in SYMMETRISATIONS.values():
        assert intersection(forward, backward) <= symmetrise(forward, backward) <= union(forward, backward)


@given(LINKS)
def test_two_that_agree_stay_as_they_are(links):
    for symmetrise in SYMMETRISATIONS.values():
        assert symmetrise(links, links) == links


@given(LINKS, LINKS)
def test_no_link_is_left_whose_words_are_both_free(forward, backward):
    merged = grow_diag_final_and(forward, backward)
    sources, targets = {s for s, _ in merged}, {t for _, t in merged}
    assert all(s in sources or t in targets for s, t in union(forward, backward))
