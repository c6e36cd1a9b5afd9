"""``/v1/chat/completions`` and ``/v1/completions``: one request, from its body to its end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel
from starlette.routing import BaseRoute

from stopway_core.types import Outcome
from stopway_gateway.answers import ChatAnswer, CompletionAnswer
from stopway_gateway.config import Settings
from stopway_gateway.delivery import Delivery, end_error, refusal_error
from stopway_gateway.errors import ApiError, ClientGoneError, Receive, Scope, Send, send_json
from stopway_gateway.gateway import Gateway
from stopway_gateway.generation import Generation, parse_chat, parse_completion
from stopway_gateway.limits import parse_json
from stopway_gateway.request import Request
from stopway_gateway.routes.common import DocumentedRoute, body_docs, body_of, refusals
from stopway_gateway.schemas import ChatBody, CompletionBody
from stopway_gateway.watcher import Watcher

Parse = Callable[[dict[str, Any], Settings], Generation]


def chat_completions() -> None:
    """Complete a chat, as OpenAI's API does.

    With `stream: true` the answer is events: chunks, one of them with a `finish_reason` for each
    choice, the usage if it was asked for, then `[DONE]`; a failure is an `error` event, then
    `[DONE]`. A client that leaves stops its request. OpenAI's fields that change nothing here are
    ignored; those that would change the meaning are refused.
    """


def completions() -> None:
    """Complete a text, as OpenAI's API does: one prompt for each request.

    Streams, leaving and ignored fields are as for chat completions.
    """


def routes(gateway: Gateway) -> list[BaseRoute]:
    """The generating routes; each is an ASGI application that owns ``receive`` and ``send``."""
    chat, text = Generate(gateway, parse_chat), Generate(gateway, parse_completion)
    return [
        GenerateRoute("/v1/chat/completions", chat, chat_completions, ChatBody, ChatAnswer),
        GenerateRoute("/v1/completions", text, completions, CompletionBody, CompletionAnswer),
    ]


class GenerateRoute(DocumentedRoute):
    """Documented as any other route; but FastAPI neither reads its body nor sends its answer."""

    def __init__(
        self,
        path: str,
        served: Generate,
        documentation: Callable[[], None],
        body: type[BaseModel],
        shape: type[BaseModel],
    ) -> None:
        events = {"text/event-stream": {"schema": {"type": "string"}}}
        super().__init__(
            "POST",
            path,
            documentation,
            tag="completions",
            shape=shape,
            success="The whole answer, or a stream of events. A stopped request ends as `abort`.",
            responses={
                200: {"content": events},
                **refusals(400, 401, 404, 408, 413, 429, 500, 503, 504),
            },
            extra=body_docs(body),
        )
        self.app = served


class Generate:
    """One generating route."""

    def __init__(self, gateway: Gateway, parse: Parse) -> None:
        self._gateway = gateway
        self._parse = parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; its client is watched from its first byte to its last."""
        # A client that left is no failure, and nobody is there to be told of one.
        with self._gateway.serving(), contextlib.suppress(ClientGoneError):
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        watcher = Watcher(receive)
        body = await body_of(scope, watcher, send, gateway.settings)
        if body is None:
            return
        gateway.check_draining()
        generation = self._parse(parse_json(body), gateway.settings)
        request = gateway.open(generation, scope["state"]["principal"], scope)
        await self._watched(request, watcher, scope, send)

    async def _watched(self, request: Request, watcher: Watcher, scope: Scope, send: Send) -> None:
        gateway = self._gateway
        watcher.start(lambda: gateway.client_left(request))
        request.on_overflow = lambda _: self._too_slow(request, scope)
        delivery = Delivery(
            request,
            send,
            gateway.settings,
            on_complete=watcher.close,
            on_slow=lambda: self._too_slow(request, scope),
        )
        try:
            await gateway.dispatcher.dispatch(request)
            await self._deliver(request, delivery)
        except ApiError as error:
            watcher.close()
            headers = {**error.headers, "x-request-id": request.uid}
            await send_json(send, error.status, error.to_json(), headers)
        finally:
            watcher.close()
            # However this ends, even by a cancelled task: what nobody waits for does not run on.
            gateway.client_left(request)

    async def _deliver(self, request: Request, delivery: Delivery) -> None:
        open_by = time.monotonic() + self._gateway.settings.stream_open_s
        streaming = request.generation.stream
        while not request.started and (not streaming or time.monotonic() < open_by):
            await request.changed(max(0.001, open_by - time.monotonic()) if streaming else 60.0)
        if request.gone:
            raise ClientGoneError
        if not streaming:
            await delivery.whole()
            return
        error = _early_error(request)
        if error is not None:
            raise error
        await delivery.stream()

    def _too_slow(self, request: Request, scope: Scope) -> None:
        """It does not read what it asked for; holding more for it helps nobody."""
        self._gateway.let_go(request)
        abort = scope.get("stopway.abort")
        if abort is not None:
            abort()


def _early_error(request: Request) -> ApiError | None:
    """A failure that is known before the headers have gone: it gets a status of its own."""
    if request.refusal is not None:
        return refusal_error(request)
    if request.outcome is None or request.outcome is Outcome.FINISHED:
        return None
    if any(choice.pending for choice in request.choices):
        return None
    errors = [end_error(choice.end) for choice in request.choices if choice.end is not None]
    return errors[0] if all(errors) else None
