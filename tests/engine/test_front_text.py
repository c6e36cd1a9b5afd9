"""Text that may be delivered: stop strings over token borders, characters over tokens."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stopway_engine.front.text import ChoiceText, StopMatcher
from stopway_engine.tokenizer import Detokenizer


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include=include)
    text = ""
    for piece in pieces:
        text += matcher.push(piece)
        if matcher.found is not None:
            return text, matcher.found
    return text + matcher.flush(), None


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "found"),
    [
        (["Hello EN", "D of it"], ["END"], "Hello ", "END"),
        (["Hello EN", "TRY"], ["END"], "Hello ENTRY", None),
        (["a", "ab", "aba", "c"], ["abac"], "aab", "abac"),
        (["xyEND and END"], ["END"], "xy", "END"),
        (["one two"], ["two", "one"], "", "one"),  # the first to be complete
        (["abc"], ["bc", "abc"], "", "abc"),  # of two that end together, the longer
        (["held EN"], ["END"], "held EN", None),  # a near-miss at the end is delivered whole
        (["no stops"], [], "no stops", None),
        (["é", "tu"], ["ét"], "", "ét"),
    ],
)
def test_case_e16_stop_string_over_token_borders(
    pieces: list[str], stops: list[str], text: str, found: str | None
) -> None:
    assert run(pieces, stops) == (text, found)


def test_stop_string_is_included_when_asked_for() -> None:
    assert run(["Hello EN", "D of it"], ["END"], include=True) == ("Hello END", "END")


def test_near_miss_is_held_back_no_longer_than_needed() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("a E") == "a "
    assert matcher.push("x") == "Ex"


@given(
    text=st.text(alphabet="ab", max_size=40),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 40), max_size=10),
)
def test_any_cut_gives_what_the_whole_text_gives(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    points = sorted({0, len(text), *[cut for cut in cuts if cut < len(text)]})
    pieces = [text[a:b] for a, b in itertools.pairwise(points)]
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    delivered, found = run(pieces, stops)
    if not ends:
        assert (delivered, found) == (text, None)
        return
    end, length = min(ends)
    assert found == text[end + length : end]
    assert delivered == text[: end + length]


SMILE = "😀".encode()


def choice(stops: list[str] | None = None) -> ChoiceText:
    pieces = [bytes([b]) for b in SMILE] + [b"a", b"EN", b"D!"]
    return ChoiceText(Detokenizer(pieces), stops or [], include=False)


def test_case_e17_a_character_split_over_tokens_comes_whole() -> None:
    text = choice()
    assert [text.push(token) for token in (0, 1, 2)] == [None, None, None]
    piece = text.push(3)
    assert piece is not None
    assert (piece.text, piece.tokens) == ("😀", 4)


def test_case_e17_a_request_that_ends_inside_a_character_delivers_no_half() -> None:
    text = choice()
    assert text.push(4) is not None
    assert text.push(0) is None
    assert text.finish() == ""
    assert text.tokens == 2


def test_a_hit_says_how_many_tokens_stand_up_to_it_and_takes_no_more() -> None:
    text = choice(["END"])
    assert text.push(4) is not None
    assert text.push(5) is None
    piece = text.push(6)
    assert piece is not None
    assert (piece.text, text.hit, text.stop_string) == ("", 3, "END")
    assert text.push(4) is None
    assert text.finish() == ""
    assert text.tokens == 3
