"""The frames between the leader rank and its front, both ways."""

from __future__ import annotations

from typing import Any

import pytest

from stopway_core import names
from stopway_core.events import Ended, Mode, Outputs, Submit
from stopway_core.planner import Planned
from stopway_core.turn import Turn
from stopway_core.types import Deadlines, Outcome, Reason, SamplingParams, Submission
from stopway_core.wire import Decoder, Frame, FrameKind, encode
from stopway_engine.control.front_link import outputs_frame, receive, submit_frame


class FakeLeader:
    def __init__(self) -> None:
        self.events: list[Any] = []
        self.modes: list[Mode] = []
        self.gateways: list[str] = []

    def add_event(self, event: Any) -> None:
        self.events.append(event)

    def seen_gateway(self, gateway: str) -> None:
        self.gateways.append(gateway)

    def set_mode(self, mode: Mode) -> None:
        self.modes.append(mode)


def frame_of(data: bytes) -> Frame:
    (frame,) = Decoder().feed(data)
    return frame


def test_a_submission_comes_as_it_was_sent() -> None:
    submission = Submission(
        uid="req-1",
        attempt=2,
        tenant="t",
        prompt=(1, 2, 3),
        params=SamplingParams(max_tokens=9, seed=2**62 - 1, stop_token_ids=(4, 5)),
        minted_at=17.5,
        choices=3,
        priority=-7,
        grammar='{"choice":["é","b"]}',
        deadlines=Deadlines(queue=1.5, total=9.0),
        conversation="c",
        salt="s",
        traceparent="p",
        gateway="gw/1",
    )
    leader = FakeLeader()
    receive(leader, frame_of(submit_frame(submission)))
    assert leader.events == [Submit(submission)]
    assert leader.gateways == ["gw/1"]


@pytest.mark.parametrize("mode", Mode)
def test_every_mode_comes(mode: Mode) -> None:
    leader = FakeLeader()
    receive(leader, frame_of(encode(FrameKind.FRONT_IN, {"mode": mode})))
    assert leader.modes == [mode]


def test_an_end_has_its_draft_figures() -> None:
    ended = Ended(
        key=4,
        uid="a",
        index=0,
        outcome=Outcome.FINISHED,
        reason=Reason.GRAMMAR_END,
        prompt_tokens=1,
        keep=2,
        cached_tokens=3,
        discarded_tokens=4,
        preemptions=5,
        drafted_tokens=6,
        accepted_tokens=5,
        queued_at=0.0,
        ready_at=0.0,
        admitted_at=0.0,
        first_token_at=0.0,
        ended_at=0.0,
        traceparent="",
    )
    planned = Planned(Turn(1), None, [], Outputs(ended=[ended]))
    body, _ = outputs_frame(planned, [], None)
    assert "load" not in body
    (end,) = body["ended"]
    assert (end["key"], end["drafted_tokens"], end["accepted_tokens"]) == (4, 6, 5)


def test_the_load_goes_by_name() -> None:
    load = dict.fromkeys(names.LOAD, 3)
    body, _ = outputs_frame(None, [], load)
    (frame,) = Decoder().feed(encode(FrameKind.FRONT_OUT, body))
    assert frame.body == {"load": load}
