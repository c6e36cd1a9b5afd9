"""From a request to its client: a stream of events, or one document.

No generators: a loop takes what there is and sends it, so there is nothing that can be torn down
in another task, and nothing is ever yielded into a stream that is closed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from stopway_core.types import Outcome, Reason
from stopway_gateway.config import Settings
from stopway_gateway.errors import (
    ApiError,
    ClientGoneError,
    Send,
    dumps,
    error_json,
    send_json,
    start_message,
)
from stopway_gateway.formats import FORMATS
from stopway_gateway.request import Choice, End, Item, Request

_SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_DONE = b"data: [DONE]\n\n"
_KEEPALIVE = b": keepalive\n\n"
_RETRY_AFTER = {"retry-after": "1"}
_STATUS: dict[Reason, int] = {
    Reason.DEADLINE_QUEUE: 429,
    Reason.DEADLINE_TTFT: 504,
    Reason.DEADLINE_TOTAL: 504,
    Reason.DRAIN: 503,
    Reason.RANK_LOST: 503,
    Reason.TRANSFER_FAILED: 503,
    Reason.PREEMPTED: 503,
    Reason.BAD_INPUT: 400,
    Reason.ENGINE_ERROR: 500,
}
_MESSAGES: dict[Reason, str] = {
    Reason.DEADLINE_QUEUE: "The request waited longer than its queue deadline.",
    Reason.DEADLINE_TTFT: "No token came within the first_token deadline.",
    Reason.DEADLINE_TOTAL: "The request took longer than its total deadline.",
    Reason.DRAIN: "The server is shutting down; send the request again.",
    Reason.RANK_LOST: "A part of the group was lost; send the request again.",
    Reason.TRANSFER_FAILED: "A transfer between groups failed; send the request again.",
    Reason.PREEMPTED: "The request was preempted; send it again.",
    Reason.BAD_INPUT: "The request cannot be served.",
    Reason.ENGINE_ERROR: "The engine failed on this request.",
}


def refusal_error(request: Request) -> ApiError:
    """The leader's refusal as the client's error."""
    refusal = request.refusal
    assert refusal is not None
    param = refusal.param
    if refusal.code == "invalid_grammar":
        param = request.generation.grammar_field  # the front does not know which of the two it was
    headers = _RETRY_AFTER if refusal.status in (429, 503) else None
    return ApiError(
        refusal.status, refusal.message, code=refusal.code, param=param, headers=headers
    )


def end_error(end: End) -> ApiError | None:
    """What an end means as a status; None for 200 (finished, or stopped by who asked)."""
    status = _STATUS.get(end.reason)
    if status is None or end.outcome is Outcome.FINISHED:
        return None
    message = end.message or _MESSAGES[end.reason]
    headers = _RETRY_AFTER if status in (429, 503) else None
    return ApiError(status, message, code=str(end.reason), headers=headers)


class Delivery:
    """One client's answer. ``abort`` closes its connection without waiting for it to read."""

    def __init__(
        self,
        request: Request,
        send: Send,
        settings: Settings,
        *,
        on_complete: Callable[[], None],
        on_slow: Callable[[], None],
    ) -> None:
        self._request = request
        self._send = send
        self._settings = settings
        self._on_complete = on_complete
        self._on_slow = on_slow
        self._format = FORMATS[request.generation.kind]
        self._headers = {"x-request-id": request.uid}

    # --- not streaming ------------------------------------------------------------------------

    async def whole(self) -> None:
        """Wait for every choice to end, then answer. Raises an ``ApiError`` instead of a 200."""
        request = self._request
        while not self._close_all():
            if request.gone:
                raise ClientGoneError
            await request.changed(self._pause())
        if request.gone:
            raise ClientGoneError
        ends = [choice.closed for choice in request.choices if choice.closed is not None]
        if request.refusal is not None:
            raise refusal_error(request)
        errors = [error for end in ends if (error := end_error(end)) is not None]
        if errors and len(errors) == len(ends):
            raise errors[0]
        self._on_complete()
        await self._bounded(send_json(self._send, 200, self._format.answer(request), self._headers))

    def _close_all(self) -> bool:
        for choice in self._request.choices:
            choice.kept += self._request.take(choice)
            self._request.close_choice(choice, self._settings.cut_wait_s)
        return self._request.closed

    # --- streaming ----------------------------------------------------------------------------

    async def stream(self) -> None:
        """Headers, then events until every choice has ended, then ``[DONE]``."""
        request = self._request
        headers = {**_SSE_HEADERS, **self._headers}
        await self._bounded(
            self._send(start_message(200, "text/event-stream; charset=utf-8", None, headers))
        )
        quiet_since = time.monotonic()
        while not request.gone:
            events, failure = self._events()
            if failure is not None or request.closed:
                events.append(self._finale(failure))
                self._on_complete()
                await self._put(b"".join(events), more=False)
                return
            now = time.monotonic()
            if not events and now - quiet_since >= self._settings.keepalive_s:
                events.append(_KEEPALIVE)
            if events:
                await self._put(b"".join(events), more=True)
                quiet_since = time.monotonic()
            keepalive_due = quiet_since + self._settings.keepalive_s - time.monotonic()
            await request.changed(min(self._pause(), max(0.0, keepalive_due)))
        raise ClientGoneError

    def _events(self) -> tuple[list[bytes], ApiError | None]:
        """All that may be sent now, and the failure that ends the stream if there is one."""
        events: list[bytes] = []
        request = self._request
        if request.refusal is not None:
            return events, refusal_error(request)
        for choice in request.choices:
            for item in request.take(choice):
                events += self._text(choice, item)
            end = request.close_choice(choice, self._settings.cut_wait_s)
            if end is None:
                continue
            if end.text:
                events += self._text(choice, Item(end.text, 0, None))
            if end.outcome is Outcome.FAILED:
                return events, end_error(end) or ApiError(500, "The request failed.")
            events += self._begin(choice)
            events.append(_event(self._format.last(request, choice, end)))
        return events, None

    def _text(self, choice: Choice, item: Item) -> list[bytes]:
        events = self._begin(choice)
        if item.text or item.logprobs:
            events.append(_event(self._format.piece(self._request, choice, item)))
        return events

    def _begin(self, choice: Choice) -> list[bytes]:
        if choice.began:
            return []
        choice.began = True
        head = self._format.head(self._request, choice)
        return [] if head is None else [_event(head)]

    def _finale(self, failure: ApiError | None) -> bytes:
        if failure is not None:
            error = error_json(
                failure.status, failure.message, code=failure.code, param=failure.param
            )
            return _event(error) + _DONE
        if self._request.generation.include_usage:
            return _event(self._format.usage(self._request)) + _DONE
        return _DONE

    # --- bounds -------------------------------------------------------------------------------

    def _pause(self) -> float:
        """How long nothing can fall due: until the end of the wait after a cut."""
        request = self._request
        if request.cut is None:
            return self._settings.keepalive_s
        return max(0.001, request.cut_at + self._settings.cut_wait_s - time.monotonic())

    async def _put(self, body: bytes, *, more: bool) -> None:
        await self._bounded(
            self._send({"type": "http.response.body", "body": body, "more_body": more})
        )

    async def _bounded(self, sending: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._settings.slow_reader_s):
                await sending
        except TimeoutError:
            self._on_slow()
            raise ClientGoneError from None


def _event(value: dict[str, object]) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"
