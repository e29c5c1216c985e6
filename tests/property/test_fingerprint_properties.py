"""Fingerprints: equal exactly when nothing differs, whatever the fields are."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from torchwcache.identity.fingerprint import Fingerprint, diff

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=5)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT, st.binary(max_size=3))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(TEXT, st.integers(), st.booleans()), inner, max_size=3),
        st.sets(st.one_of(st.integers(), TEXT), max_size=3),
    ),
    max_leaves=6,
)
FIELDS = st.dictionaries(st.one_of(st.sampled_from(["checkpoint", "config", "code"]), TEXT), VALUES, max_size=5)


def shuffled(value: Any, random: Any) -> Any:
    if isinstance(value, dict):
        items = [(key, shuffled(item, random)) for key, item in value.items()]
        random.shuffle(items)
        return dict(items)
    if isinstance(value, list | tuple):
        return type(value)(shuffled(item, random) for item in value)
    return copy.deepcopy(value)


@given(FIELDS, FIELDS)
def test_the_difference_is_empty_exactly_when_the_digests_are_equal(one: dict[str, Any], two: dict[str, Any]) -> None:
    a, b = Fingerprint.from_fields(one), Fingerprint.from_fields(two)
    assert (a.hex == b.hex) == (diff(a, b) == ()) == (a == b)
    assert [item.path for item in diff(a, b)] == [item.path for item in diff(b, a)]
    assert all(str(item) for item in diff(a, b))


@given(FIELDS, st.randoms())
def test_order_and_transport_change_nothing(fields: dict[str, Any], random: Any) -> None:
    one = Fingerprint.from_fields(fields)
    assert Fingerprint.from_fields(shuffled(fields, random)) == one
    assert Fingerprint.decode(one.encode()) == one
    assert diff(one, Fingerprint.decode(one.encode())) == ()


@given(FIELDS, VALUES)
def test_one_more_field_is_the_only_difference(fields: dict[str, Any], value: Any) -> None:
    fields.pop("added", None)
    one, two = Fingerprint.from_fields({**fields, "added": value}), Fingerprint.from_fields(fields)
    [difference] = diff(one, two)
    assert difference.path == "added"
    assert difference.cached == "absent"
    assert difference.wanted != "absent" or value == "absent"


@given(FIELDS, VALUES, VALUES)
def test_only_the_checkpoint_stays_out_of_the_family(fields: dict[str, Any], one: Any, two: Any) -> None:
    a, b = (Fingerprint.from_fields({**fields, "checkpoint": value}) for value in (one, two))
    assert a.family == b.family
    assert all(item.path.startswith("checkpoint") for item in diff(a, b))
