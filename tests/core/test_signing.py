"""Stops as they travel: nobody changes one, and no input raises anything but StopError."""

import contextlib
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stopway_core import names, signing
from stopway_core.signing import StopError, sign, verify
from stopway_core.types import Reason, Stop, Target

KEYS = {"1": "secret", "2": "older"}
STOP = Stop(
    "stop-1", Target(uids=("a", "b")), Reason.CLIENT_CANCEL, "acme", False, 1000.25, "tp", "gw", 7
)
NAMES = st.from_regex(r"\A[A-Za-z0-9._:-]{1,128}\Z")
TARGETS = (
    st.just(Target(everything=True))
    | NAMES.map(lambda name: Target(tenant=name))
    | st.text(min_size=1, max_size=128).map(lambda name: Target(conversation=name))
    | st.lists(NAMES, min_size=1, max_size=5, unique=True).map(lambda u: Target(uids=tuple(u)))
)


@settings(deadline=None)
@given(TARGETS, st.sampled_from(sorted(signing._STOP_REASONS)), st.booleans(), st.floats(0, 2e9))
def test_round_trip_through_json(target: Target, reason: Reason, admin: bool, at: float) -> None:
    stop = replace(STOP, target=target, reason=reason, admin=admin, issued_at=at)
    assert verify(json.loads(json.dumps(sign(stop, "secret"))), KEYS) == stop


@pytest.mark.parametrize("field", [*sign(STOP, "secret"), "extra"])
def test_a_change_of_any_field_is_found(field: str) -> None:
    entry = sign(STOP, "secret")
    for other in ("x", 1, None, True, [], {}, "2"):
        if entry.get(field, ...) is not other:
            with pytest.raises(StopError):
                verify({**entry, field: other}, KEYS)
    if field != "extra":
        with pytest.raises(StopError):
            verify({k: v for k, v in entry.items() if k != field}, KEYS)


def test_keys_rotate_by_name() -> None:
    assert verify(sign(STOP, "older", "2"), KEYS) == STOP
    with pytest.raises(StopError, match="signature"):
        verify(sign(STOP, "older", "1"), KEYS)
    with pytest.raises(StopError, match="not known"):
        verify(sign(STOP, "secret", "3"), KEYS)


def test_age_and_future_are_bounded() -> None:
    entry = sign(STOP, "secret")
    assert verify(entry, KEYS, now=1000.0) == STOP
    for now in (900.0, 1000.25 + 3601):
        with pytest.raises(StopError, match="clocks"):
            verify(entry, KEYS, now=now)


def resigned(**fields: object) -> dict[str, object]:
    entry = {**sign(STOP, "secret"), **fields}
    entry["sig"] = signing._digest(entry, "secret")
    return entry


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_id": ""},
        {"stop_id": "a b"},
        {"stop_id": "a\n"},
        {"stop_id": "x" * 129},
        {"tenant": ""},
        {"tenant": 5},
        {"traceparent": "x" * 300},
        {"reason": "eos"},  # an end, and nothing that one may ask for
        {"reason": "because"},
        {"reason": []},
        {"issued_at": "soon"},
        {"issued_at": 10**400},
        {"sequence": None},
        {"sequence": float("inf")},
        {"target": {}},
        {"target": {"all": False}},
        {"target": {"all": 1}},
        {"target": {"uids": []}},
        {"target": {"uids": ["a", 5]}},
        {"target": {"uids": ["a\n"]}},
        {"target": {"uids": ["a"] * (signing.UIDS_MAX + 1)}},
        {"target": {"uids": ["a"], "tenant": "t"}},
        {"target": {"conversation": ""}},
        {"target": {"tenant": "a/b"}},
        {"target": ["all"]},
    ],
)
def test_well_signed_nonsense_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(StopError):
        verify(resigned(**fields), KEYS, now=1000.0)


def test_a_request_named_twice_is_one() -> None:
    entry = resigned(target={"uids": ["a", "a", "b"]})
    assert verify(entry, KEYS).target.uids == ("a", "b")


@pytest.mark.parametrize("sig", ["é", "\ud800", "", None, 5, [], "0" * 64])
def test_no_signature_can_raise_anything_else(sig: object) -> None:
    with pytest.raises(StopError):
        verify({**sign(STOP, "secret"), "sig": sig}, KEYS)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(deadline=None, max_examples=200)
@given(JSON, st.dictionaries(st.sampled_from(sorted(sign(STOP, "secret"))), JSON))
def test_hostile_json_raises_stop_errors_and_nothing_else(whole: object, parts: dict) -> None:
    for entry in (whole, {"kid": "1", **parts}, resigned(**{**parts, "kid": "1"})):
        with contextlib.suppress(StopError):
            verify(entry, KEYS, now=1000.0)


def test_deep_json_is_refused() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(StopError):
        verify({"kid": "1", "target": deep}, KEYS)
    while deep:  # taken apart by hand: freeing it at once recurses
        deep = deep.pop()  # type: ignore[assignment]


@given(st.text(max_size=20))
def test_ids_that_pass_are_safe_in_a_header(text: str) -> None:
    if names.valid_id(text):
        assert text.isascii() and text.isprintable() and " " not in text
