"""Silent ranks are found; that the watchdog itself stood still makes nobody silent."""

from types import SimpleNamespace

import pytest

from stopway_engine.pod.watchdog import START_S, Watchdog

LOSS_S = 4.0


def rank(heard_at: float, state: str = "ready", code: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(heard_at=heard_at, state=state, code=code)


@pytest.mark.parametrize(
    ("one", "is_silent"),
    [
        (rank(100.0 - LOSS_S), False),
        (rank(99.9 - LOSS_S), True),
        (rank(99.9 - LOSS_S, "loading"), True),
        (rank(99.9 - LOSS_S, "starting"), False),
        (rank(99.9 - START_S, "starting"), True),
        (rank(0.0, code=1), False),  # it has gone already
    ],
)
def test_silence_is_measured_from_the_last_word(one: SimpleNamespace, is_silent: bool) -> None:
    watchdog = Watchdog(LOSS_S)
    watchdog.silent([], 100.0 - watchdog.period_s)
    assert watchdog.silent([one], 100.0) == ([one] if is_silent else [])


def test_after_a_standstill_it_hears_them_out_first() -> None:
    watchdog = Watchdog(LOSS_S)
    one = rank(100.0)
    assert watchdog.silent([one], 100.5) == []
    assert watchdog.silent([one], 130.0) == []  # it was stopped, and the rank spoke to nobody
    assert watchdog.silent([one], 130.0 + watchdog.period_s) == [one]  # it has been heard out
