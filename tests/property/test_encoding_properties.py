"""The encoding: exact types survive, and canonical bytes tell apart what Python's ``==`` does not."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchwcache.encoding import Value, canonical_bytes, decode, encode, from_bytes, to_bytes
from torchwcache.errors import EncodingError

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=4)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-(2**63) - 1, -(2**63), 2**63, 2**64 - 1, 2**64, 2**200]),
    st.floats(allow_nan=True),
    st.complex_numbers(allow_nan=False),
    TEXT,
    st.binary(max_size=4),
    st.just(...),
    st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.sampled_from([-2, -1, 1, 3])),
)
HASHABLE = st.one_of(SCALARS, st.tuples(SCALARS, SCALARS), st.frozensets(SCALARS, max_size=2))


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.builds(deque, st.lists(inner, max_size=4), st.sampled_from([None, 4, 9])),
        st.sets(HASHABLE, max_size=4),
        st.frozensets(HASHABLE, max_size=4),
        st.dictionaries(HASHABLE, inner, max_size=4),
        st.dictionaries(TEXT, inner, max_size=4).map(OrderedDict),
        st.builds(slice, inner, inner, inner),
    )


VALUES = st.recursive(SCALARS, containers, max_leaves=8)


def same(one: Any, two: Any) -> bool:
    """Equal in type and value, all the way down; NaN is itself, and -0.0 is not 0.0."""
    if type(one) is not type(two):
        return False
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(two)) or (one == two and math.copysign(1, one) == math.copysign(1, two))
    if isinstance(one, complex):
        return same(one.real, two.real) and same(one.imag, two.imag)
    if isinstance(one, slice):
        return same((one.start, one.stop, one.step), (two.start, two.stop, two.step))
    if isinstance(one, deque) and one.maxlen != two.maxlen:
        return False
    if isinstance(one, list | tuple | deque):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, set | frozenset):
        return len(one) == len(two) and {to_bytes(encode(item)) for item in one} == {to_bytes(encode(item)) for item in two}
    if isinstance(one, dict):
        return len(one) == len(two) and all(same(a, b) for a, b in zip(one.items(), two.items(), strict=True))
    return bool(one == two)


@given(VALUES)
def test_values_come_back_with_their_exact_types(value: Any) -> None:
    assert same(decode(from_bytes(to_bytes(encode(value)))), value)


@given(st.dictionaries(TEXT, VALUES, max_size=6), st.randoms())
def test_the_order_in_which_a_dict_was_filled_does_not_count(value: dict[str, Any], random: Any) -> None:
    items = list(value.items())
    random.shuffle(items)
    assert canonical_bytes(encode({"outer": dict(items)})) == canonical_bytes(encode({"outer": value}))


def test_the_order_of_an_ordered_dict_counts() -> None:
    one, two = OrderedDict([("a", 1), ("b", 2)]), OrderedDict([("b", 2), ("a", 1)])
    assert canonical_bytes(encode(one)) != canonical_bytes(encode(two))
    assert canonical_bytes(encode(slice({"a": 1, "b": 2}))) == canonical_bytes(encode(slice({"b": 2, "a": 1})))


@given(st.sets(HASHABLE, max_size=6), st.randoms())
def test_nor_does_the_order_of_a_set(value: set[Any], random: Any) -> None:
    items = list(value)
    random.shuffle(items)
    assert canonical_bytes(encode(set(items))) == canonical_bytes(encode(value))


@given(VALUES, VALUES)
def test_canonical_bytes_are_equal_only_for_equal_values(one: Any, two: Any) -> None:
    if canonical_bytes(encode(one)) == canonical_bytes(encode(two)):
        assert canonical_bytes(encode([one])) == canonical_bytes(encode([two]))
        assert same(decode(from_bytes(canonical_bytes(encode(one)))), decode(from_bytes(canonical_bytes(encode(two)))))


DISTINCT: tuple[Any, ...] = (
    1,
    True,
    1.0,
    "1",
    b"1",
    1 + 0j,
    2**64,
    2**64 - 1,
    -(2**63),
    -(2**63) - 1,
    0.0,
    -0.0,
    float("nan"),
    float("inf"),
    None,
    "None",
    ...,
    (),
    [],
    {},
    OrderedDict(),
    set(),
    frozenset(),
    deque(),
    deque(maxlen=3),
    (1,),
    [1],
    [True],
    [[1]],
    range(1),
    range(2),
    slice(1),
    slice(1, None),
    PurePosixPath("1"),
    {"a": 1},
    {b"a": 1},
    {1: "a"},
    {True: "a"},
    [("a", 1)],
)


def test_what_python_calls_equal_is_told_apart() -> None:
    assert len({canonical_bytes(encode(value)) for value in DISTINCT}) == len(DISTINCT)


class IntLike(int):
    pass


class DictLike(dict[str, Any]):
    pass


@pytest.mark.parametrize(
    "value", [object(), IntLike(1), DictLike(), lambda: 1, [1, {"deep": (object(),)}], "\ud800", {1: object()}]
)
def test_everything_else_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(EncodingError) as caught:
        encode(value, path="config")
    assert str(caught.value).startswith("config")


def test_what_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(EncodingError, match="contains itself"):
        encode(value)
    assert decode(encode([[], []])) == [[], []]


@given(st.binary(max_size=40))
def test_hostile_bytes_are_an_error_or_a_value(data: bytes) -> None:
    try:
        value: Value = from_bytes(data)
    except EncodingError:
        return
    assert from_bytes(to_bytes(value)) == value or b"\x7f\xf8" in data or "nan" in repr(value)
