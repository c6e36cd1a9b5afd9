"""The session with one leader: a WebSocket that is also the lease of the requests on it.

It reconnects by itself, with backoff and jitter. When it breaks, the requests on it end as
``rank_lost``: nothing is retried here, because the leader may have computed and delivered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from stopway_core import names
from stopway_core.events import Mode
from stopway_core.types import Outcome, Reason
from stopway_gateway.request import End, Item, Refusal, Request
from stopway_gateway.tasks import end_tasks
from stopway_gateway.words import AdminWords

_LOG = logging.getLogger(__name__)
_BACKOFF_S = (0.1, 2.0)
_MESSAGE_BYTES_MAX = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Listener:
    """Who is told of what comes from a leader."""

    receipt: Callable[[dict[str, Any]], None]
    change: Callable[[LeaderSession], None]  # it came, went, or has another epoch
    draining: Callable[[LeaderSession, float], None]
    refused: Callable[[LeaderSession, Request, Refusal], None]
    mode: Callable[[LeaderSession], None]
    load: Callable[[LeaderSession], None]


class LeaderSession:
    """One leader, by URL. ``ready``: its group can serve."""

    def __init__(
        self,
        url: str,
        name: str,
        *,
        gateway: str,
        secret: str,
        epoch_grace_s: float,
        words: AdminWords,
        listener: Listener,
    ) -> None:
        self.url = url.rstrip("/")
        self.group = name
        self.epoch: int | None = None
        self.connected = False
        self.draining = False  # its group ends: what runs there goes on
        self.retiring = False  # gone from the list of groups: takes nothing new
        self.superseded = False  # another session has a newer epoch of its group
        self.mode = Mode.RUNNING  # as its leader last told it
        self.wanted = Mode.RUNNING  # an admin's newest word: the mode follows
        self.said_at = 0.0  # Unix seconds: of the newest word that its front has told of
        self.answered_at = 0.0  # the same, of the newest that its leader has answered
        self.mode_messages = 0
        self.stretch = 0  # of its time: a new one begins with each hello and each epoch
        self.hello: dict[str, Any] = {}
        self.load: dict[str, int] = {}
        self.live: dict[str, Request] = {}
        self.outstanding = 0  # estimated tokens of the requests on it
        self._gateway = gateway
        self._headers = {"Authorization": f"Bearer {secret}"}
        self._epoch_grace_s = epoch_grace_s
        self._words = words
        self._listener = listener
        self._outbox: asyncio.Queue[str] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._handlers: dict[str, Callable[[dict[str, Any]], None]] = {
            "hello": self._on_hello,
            "epoch": self._on_epoch,
            "draining": self._on_draining,
            "accepted": self._on_accepted,
            "refused": self._on_refused,
            "out": self._on_out,
            "end": self._on_end,
            "receipt": lambda message: listener.receipt(message["receipt"]),
            "mode": self._on_mode,
            "load": self._on_load,
        }

    @property
    def ready(self) -> bool:
        """Whether new requests may go there."""
        taken_out = self.draining or self.retiring or self.superseded
        return self.connected and self.epoch is not None and not taken_out

    def start(self) -> None:
        """Connect, and stay connected."""
        self._task = asyncio.create_task(self._run(), name=f"leader {self.url}")

    async def close(self) -> None:
        """Break the lease and stop trying."""
        await end_tasks(self._task)

    def retire(self, retiring: bool) -> None:
        """Whether it has left the list of groups, and so takes nothing new."""
        came_back = self.retiring and not retiring
        self.retiring = retiring
        if came_back:
            self._listener.change(self)  # requests may wait for it

    def supersede(self, superseded: bool) -> None:
        """Whether its epoch is over, because its group has a newer one elsewhere."""
        if superseded and not self.superseded and self.epoch is not None:
            self._later(self._end_superseded)
        self.superseded = superseded

    def submit(self, request: Request, message: dict[str, Any]) -> None:
        """Send a request; from now on this session says how it ends."""
        request.group = self.group
        request.policy = str(self.hello.get("policy", ""))
        request.epoch = self.epoch
        request.stretch = self.stretch
        request.release = lambda: self.forget(request)
        self.live[request.uid] = request
        self.outstanding += request.generation.cost
        self._send({**message, "epoch": self.epoch})

    def take_back(self, request: Request) -> None:
        """It was refused, and waits for another session as if it had never been here."""
        self.forget(request)
        request.group = request.policy = ""
        request.epoch = None
        request.release = lambda: None

    def forget(self, request: Request) -> None:
        """Its outcome is settled, or it goes elsewhere."""
        if self.live.pop(request.uid, None) is not None:
            self.outstanding -= request.generation.cost

    def send_stop(self, signed: dict[str, Any]) -> bool:
        """The direct path for one stop; False when there is no connection."""
        if self.connected:
            self._send({"type": "stop", "stop": signed})
        return self.connected

    def send_mode(self, mode: Mode) -> None:
        """Tell the group's leader; ``mode`` is this one when it says so."""
        self.wanted = mode
        self._send({"type": "mode", "mode": mode})

    def _remind(self, message: dict[str, Any]) -> None:
        """Tell a front of a word that is newer than what it knows, before it is sent a request."""
        wanted = message["wanted"]
        word = self._words.hear(
            self.group, None if wanted is None else Mode(wanted), float(message["said_at"])
        )
        if word is not None:
            mode, said_at = word
            self.wanted = mode
            self._send({"type": "mode", "mode": mode, "said_at": said_at})

    def _send(self, message: dict[str, Any]) -> None:
        self._outbox.put_nowait(json.dumps(message, separators=(",", ":")))

    # --- the connection -----------------------------------------------------------------------

    async def _run(self) -> None:
        backoff = _BACKOFF_S[0]
        while True:
            had_hello = False
            try:
                async with self._connect() as socket:
                    await self._serve(socket)
            except (OSError, WebSocketException, TimeoutError, ValueError) as error:
                _LOG.info("leader %s: %s", self.url, error or type(error).__name__)
            finally:
                had_hello = bool(self.hello)
                self._lost()
            backoff = _BACKOFF_S[0] if had_hello else min(backoff * 2, _BACKOFF_S[1])
            await asyncio.sleep(backoff * random.uniform(0.5, 1.5))

    def _connect(self) -> connect:
        base = self.url.replace("http", "ws", 1)
        return connect(
            f"{base}/internal/v1/session?gateway={self._gateway}",
            additional_headers=self._headers,
            open_timeout=5,
            ping_interval=5,
            ping_timeout=10,
            close_timeout=1,
            max_size=_MESSAGE_BYTES_MAX,
            max_queue=64,
            compression=None,
            proxy=None,
        )

    async def _serve(self, socket: ClientConnection) -> None:
        self._outbox = asyncio.Queue()
        sender = asyncio.create_task(self._sender(socket, self._outbox))
        try:
            async for text in socket:
                self._receive(text)
        finally:
            await end_tasks(sender)

    async def _sender(self, socket: ClientConnection, outbox: asyncio.Queue[str]) -> None:
        # A closed connection ends the reader too, and that is where it is dealt with.
        with contextlib.suppress(WebSocketException, OSError):
            while True:
                await socket.send(await outbox.get())

    def _lost(self) -> None:
        was_connected, self.connected = self.connected, False
        self.epoch = None
        self.hello = {}
        self.load = {}
        for request in list(self.live.values()):
            request.settle(Reason.RANK_LOST, "The connection to the group was lost.")
        if was_connected:
            self._listener.change(self)

    # --- messages -----------------------------------------------------------------------------

    def _receive(self, text: str | bytes) -> None:
        try:
            message = json.loads(text)
            handler = self._handlers.get(message["type"])
            if handler is not None:
                handler(message)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            _LOG.warning("leader %s sent what cannot be read: %r", self.url, error)

    def _on_hello(self, message: dict[str, Any]) -> None:
        # Also sent when a new epoch forms on a session that stands.
        self.mode = Mode(message["mode"])
        self.said_at, self.answered_at = float(message["said_at"]), 0.0
        self.wanted = Mode(message["wanted"] or Mode.RUNNING)
        self.group = str(message["group"])
        self._remind(message)
        self.hello = message
        self.connected = True
        self.draining = False
        self._on_epoch(message)

    def _on_draining(self, message: dict[str, Any]) -> None:
        self.draining = True
        self._listener.draining(self, float(message.get("seconds", 0.0)))

    def _on_mode(self, message: dict[str, Any]) -> None:
        self.mode = Mode(message["mode"])
        self.mode_messages += 1
        said_at = float(message["said_at"])
        if said_at > self.said_at:
            # Its front has a word, with the old mode in force still. What it sent before it had
            # ours has nothing newer, and must not undo that.
            self.said_at = said_at
            self.wanted = Mode(message["wanted"] or Mode.RUNNING)
        else:
            self.answered_at = said_at
        self._remind(message)
        self._listener.mode(self)

    def _on_epoch(self, message: dict[str, Any]) -> None:
        before, self.epoch = self.epoch, message["epoch"]
        if before is not None and before != self.epoch:
            self._later(self._end_until)
        self.stretch += 1
        self._listener.change(self)

    def _later(self, end: Callable[[int], None]) -> None:
        # The leader ends the requests of an epoch that ended; if it does not, we do.
        asyncio.get_running_loop().call_later(self._epoch_grace_s, end, self.stretch)

    def _end_superseded(self, stretch: int) -> None:
        if self.superseded:
            self._end_until(stretch)

    def _end_until(self, stretch: int) -> None:
        # Not by its epoch: when only the link broke, the same one goes on with new requests.
        for request in list(self.live.values()):
            if request.stretch <= stretch:
                request.settle(Reason.RANK_LOST, "The group restarted.")

    def _on_accepted(self, message: dict[str, Any]) -> None:
        request = self.live.get(message["uid"])
        if request is not None:
            # It may have met the leader after its link broke and came back: it is of that time.
            request.stretch = self.stretch
            request.on_accepted(int(message["prompt_tokens"]))

    def _on_refused(self, message: dict[str, Any]) -> None:
        request = self.live.get(message["uid"])
        if request is None:
            return
        status = message.get("status", 400)
        refusal = Refusal(
            status if isinstance(status, int) and 400 <= status < 600 else 400,
            str(message.get("message", "refused")),
            message.get("code"),
            message.get("param"),
        )
        self._listener.refused(self, request, refusal)

    def _on_out(self, message: dict[str, Any]) -> None:
        for item in message["items"]:
            request = self.live.get(item["uid"])
            if request is not None:
                piece = Item(item["text"], int(item["tokens"]), item.get("logprobs"))
                request.on_out(int(item["index"]), piece)

    def _on_end(self, message: dict[str, Any]) -> None:
        request = self.live.get(message["uid"])
        if request is None:
            return
        request.prompt_tokens = int(message.get("prompt_tokens") or request.prompt_tokens)
        request.cached_tokens = int(message.get("cached_tokens") or 0)
        end = End(
            outcome=Outcome(message["outcome"]),
            reason=Reason(message["reason"]),
            finish_reason=str(message["finish_reason"]),
            text=message.get("text") or "",
            stop_string=message.get("stop_string"),
            completion_tokens=int(message.get("completion_tokens") or 0),
            discarded_tokens=int(message.get("discarded_tokens") or 0),
            drafted_tokens=int(message.get("drafted_tokens") or 0),
            accepted_tokens=int(message.get("accepted_tokens") or 0),
            message=message.get("message") or "",
        )
        request.on_end(int(message["index"]), end)

    def _on_load(self, message: dict[str, Any]) -> None:
        self.load = {key: int(message.get(key) or 0) for key in names.LOAD}
        self._listener.load(self)
