"""The middle of the front: sessions of gateways on one side, the leader rank on the other."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from stopway_core import names
from stopway_core.admission import REFUSE_DRAIN
from stopway_core.events import Mode
from stopway_core.types import Outcome, Reason, Stop, Submission, finish_reason_of
from stopway_core.wire import Frame, FrameKind, encode
from stopway_engine.config import PodConfig
from stopway_engine.control.front_link import submit_frame
from stopway_engine.front.mode import GroupMode
from stopway_engine.front.prepare import Clock, Preparation
from stopway_engine.front.requests import FrontRequest, Rejected, epoch_of, submission
from stopway_engine.front.session import Session
from stopway_engine.front.stops import FrontStops
from stopway_engine.front.text import ChoiceText
from stopway_engine.tokenizer import TextCodec

LOST = "a rank of this group was lost; send the request again"


Send = Callable[[bytes], None]


class Hub:
    """All state of the front; everything runs on one event loop."""

    def __init__(
        self,
        config: PodConfig,
        codec: TextCodec,
        publish_receipt: Callable[[dict[str, Any]], None],
    ) -> None:
        self.config = config
        self.codec = codec
        self.sessions: dict[str, Session] = {}
        self.stops = FrontStops(config.group, self._on_receipt)
        self._publish_receipt = publish_receipt
        self._send_engine: Send | None = None  # of the link that stands, and tells it from others
        self._alone = asyncio.Event()  # no link to a leader stands
        self._alone.set()
        self._hello: dict[str, Any] = {}
        self._draining = False
        self.mode = GroupMode(self._engine, self._tell_all)
        self._load: dict[str, int] | None = None
        self._requests: dict[str, FrontRequest] = {}
        self._choices: dict[int, tuple[FrontRequest, int]] = {}  # by key
        self._ledgers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next_ledger = 1
        self._preparation = Preparation(codec)

    # --- state ---------------------------------------------------------------------------

    @property
    def epoch(self) -> int | None:
        """The epoch that can take requests now."""
        if self._send_engine is None or self._draining:
            return None
        epoch: int = self._hello["epoch"]
        return epoch

    def hello(self) -> dict[str, Any]:
        """The first message of a session."""
        config = self.config
        return {
            "type": "hello",
            "group": config.group,
            "epoch": self.epoch,
            "model": config.model_name,
            "max_model_len": self._hello.get("max_model_len", 0),
            "total_blocks": self._hello.get("total_blocks", 0),
            "block_size": config.block_size,
            "ranks": config.world,
            "policy": config.policy,
            "numerics": config.numerics,
            **self.mode.fields(),
        }

    # --- gateways ------------------------------------------------------------------------

    def open(self, session: Session) -> None:
        """A gateway has connected; a session that it had before is over."""
        old = self.sessions.get(session.gateway)
        self.sessions[session.gateway] = session
        if old is not None:
            self._lose(old)
            old.close()
        session.send(self.hello())
        if self._load is not None:
            session.send({"type": "load", **self._load})

    def closed(self, session: Session) -> None:
        """The lease is over: what the gateway asked for on it stops."""
        if self.sessions.get(session.gateway) is session:
            del self.sessions[session.gateway]
            self._lose(session)

    def _lose(self, session: Session) -> None:
        session.lost = True
        self._preparation.checks.lose(session.lease)
        for uid in [uid for uid, r in self._requests.items() if r.session is session]:
            del self._requests[uid]
        self._choices = {k: v for k, v in self._choices.items() if v[0].session is not session}
        self._engine({"lease_lost": session.lease})

    async def last_words(self) -> None:
        """Wait until the leader's link has ended, and sessions were sent all that came of it."""
        await self._alone.wait()
        await asyncio.gather(*(session.flushed() for session in self.sessions.values()))

    async def submit(self, session: Session, message: Mapping[str, Any]) -> None:
        """Check and tokenize a request and pass it on, or say why not."""
        uid = message["uid"]
        check_epoch = partial(self._check_epoch, epoch_of(message), self._send_engine)
        clock = Clock(message, self.config)
        try:
            check_epoch()
            limit = self._hello["max_model_len"]
            tokens = await self._preparation.tokens(
                message, session.lease, clock, limit, check_epoch
            )
            left = clock.left()
            if uid in self._requests:
                known = f"request {uid} is known here already"
                raise Rejected(known, status=409, code="duplicate", param=None)
        except Rejected as error:
            session.send(_refused(uid, error.status, str(error), error.code, error.param))
            return
        if not session.lost:
            self._pass_on(session, message, submission(message, tokens, session.lease, limit, left))

    def _check_epoch(self, epoch: int, link: Send | None) -> None:
        """Raise ``Rejected`` unless a request of ``epoch``, and of ``link``, can go there now.

        Its gateway gives up what was under way when they end: later it would run for nobody.
        """
        if link is None or link is not self._send_engine or epoch != self._hello["epoch"]:
            raise Rejected(LOST, status=503, code=Reason.RANK_LOST, param=None)
        if self._draining:
            raise Rejected(REFUSE_DRAIN, status=503, code=Reason.DRAIN, param=None)

    def _pass_on(self, session: Session, message: Mapping[str, Any], made: Submission) -> None:
        request = FrontRequest(made.uid, session, made.params.logprobs >= 0, len(made.prompt))
        for index in range(made.choices):
            request.texts[index] = ChoiceText(
                self.codec.detokenizer(),
                message.get("stop") or (),
                include=bool(message.get("include_stop_str_in_output")),
            )
        self._requests[made.uid] = request
        self._send_to_engine(submit_frame(made))

    def stop(self, stop: Stop, entry: dict[str, Any]) -> None:
        """Pass on the entry of a stop, which has been verified; it may come many times."""
        self._preparation.checks.stop(stop)
        connected = self._send_engine is not None
        if self.stops.passed(entry, sent=connected) and connected:
            self._engine({"stop": entry})

    async def ledger(self) -> dict[str, Any]:
        """The leader's ledger. Raises ``TimeoutError`` when it does not answer."""
        number = self._next_ledger
        self._next_ledger += 1
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._ledgers[number] = future
        try:
            if self._send_engine is None:
                raise TimeoutError
            self._engine({"ledger": number})
            return await asyncio.wait_for(future, 5.0)
        finally:
            del self._ledgers[number]

    # --- the leader rank -----------------------------------------------------------------

    def engine_connected(self, send: Send, first: Mapping[str, Any]) -> None:
        """A new epoch can serve; ``first`` is the body of its leader's first frame."""
        if self._send_engine is not None:
            self.engine_lost(self._send_engine)  # that it ended has not been read yet
        hello = first["hello"]
        same_epoch = hello["epoch"] == self._hello.get("epoch")
        self._hello = hello
        self._draining = hello["draining"]
        self._send_engine = send
        self._alone.clear()
        self.mode.leader_came(Mode(first["mode"]))
        if same_epoch:
            self.stops.epoch_goes_on()
        else:
            self.stops.epoch_formed()
        for entry in self.stops.take_held():
            self._engine({"stop": entry})
        self._tell_all(self.hello())
        print(
            f"group {self.config.group} serves epoch {hello['epoch']}", file=sys.stderr, flush=True
        )

    def engine_lost(self, send: Send) -> None:
        """The epoch is over: every request on it has ended, with a reason."""
        if send is not self._send_engine:
            return
        self._send_engine = None
        self._alone.set()
        self._preparation.checks.refuse_all(LOST, Reason.RANK_LOST)
        self._tell_all({"type": "epoch", "epoch": None})
        for request in list(self._requests.values()):
            for index in list(request.texts):
                if request.accepted:
                    self._end_lost(request, index)
            if not request.accepted:
                request.session.send(_refused(request.uid, 503, LOST, "rank_lost"))
        self._requests.clear()
        self._choices.clear()
        self.stops.epoch_ended(self._hello["epoch"])
        self._on_load(dict.fromkeys(names.LOAD, 0))

    def engine_frame(self, send: Send, frame: Frame) -> None:
        """One turn's outputs, or an answer; nothing of a link that another has replaced."""
        if send is not self._send_engine:
            return
        body = frame.body
        for uid, keys in body.get("accepted", ()):
            self._on_accepted(uid, keys)
        for uid, status, code, message in body.get("refused", ()):
            request = self._requests.pop(uid, None)
            if request is not None:
                request.session.send(_refused(uid, status, message, code))
        if frame.arrays:
            self._on_tokens(frame.arrays[0], frame.arrays[1], body.get("logprobs"))
        for ended in body.get("ended", ()):
            self._on_ended(ended)
        if "load" in body:  # before the receipts: who waits for one may look at what is free
            self._on_load(body["load"])
        for receipt in body.get("receipts", ()):
            self.stops.receipt(receipt)
        if "mode" in body:
            self.mode.leader_says(Mode(body["mode"]))
        if "draining" in body:
            self._draining = True
            self._preparation.checks.refuse_all(REFUSE_DRAIN, Reason.DRAIN)
            self._tell_all({"type": "draining", "seconds": body["draining"]})
        if "ledger" in body:
            future = self._ledgers.get(body["ledger"])
            if future is not None and not future.done():
                future.set_result(body["snapshot"])

    def _on_accepted(self, uid: str, keys: list[int]) -> None:
        request = self._requests.get(uid)
        if request is None:
            return
        request.accepted = True
        for index, key in enumerate(keys):
            self._choices[key] = (request, index)
        request.session.send(
            {"type": "accepted", "uid": uid, "prompt_tokens": request.prompt_tokens}
        )

    def _on_tokens(self, keys: Any, tokens: Any, logprobs: list[Any] | None) -> None:
        items: dict[str, list[dict[str, Any]]] = {}
        for at, (key, token) in enumerate(zip(keys, tokens, strict=True)):
            found = self._choices.get(key)
            if found is None:
                continue
            request, index = found
            text = request.texts[index]
            if text.hit is not None:
                continue
            piece = text.push(token)
            if text.hit is not None:
                self._engine({"hit": [key, text.hit]})
            detail = None
            if request.logprobs and logprobs is not None and logprobs[at] is not None:
                detail = [self._logprob(token, *logprobs[at])]
            if piece is None and detail is None:
                continue
            items.setdefault(request.session.gateway, []).append(
                {
                    "uid": request.uid,
                    "index": index,
                    "text": piece.text if piece else "",
                    "tokens": piece.tokens if piece else 0,
                    "logprobs": detail,
                }
            )
        for gateway, batch in items.items():
            session = self.sessions.get(gateway)
            if session is not None:
                session.send({"type": "out", "items": batch})

    def _logprob(self, token: int, logprob: float, top: list[Any]) -> dict[str, Any]:
        text, raw = self.codec.piece(token)
        return {
            "token": text,
            "token_id": token,
            "bytes": list(raw),
            "logprob": logprob,
            "top": [self._logprob(t, p, []) for t, p in top],
        }

    def _on_ended(self, ended: dict[str, Any]) -> None:
        found = self._choices.pop(ended["key"], None)
        if found is None:
            return
        request, index = found
        text = request.texts.pop(index)
        if not request.texts:
            self._requests.pop(request.uid, None)
        keep = ended["keep"] if text.hit is None else min(ended["keep"], text.hit)
        request.session.send(
            {
                "type": "end",
                "uid": request.uid,
                "index": index,
                "outcome": ended["outcome"],
                "reason": ended["reason"],
                "finish_reason": finish_reason_of(Reason(ended["reason"])),
                "text": text.finish(),
                "stop_string": text.stop_string,
                "prompt_tokens": ended["prompt_tokens"],
                "completion_tokens": keep,
                "cached_tokens": ended["cached_tokens"],
                "discarded_tokens": ended["discarded_tokens"] + ended["keep"] - keep,
                "drafted_tokens": ended["drafted_tokens"],
                "accepted_tokens": ended["accepted_tokens"],
                "message": ended["message"] or None,
            }
        )

    def _end_lost(self, request: FrontRequest, index: int) -> None:
        text = request.texts[index]
        request.session.send(
            {
                "type": "end",
                "uid": request.uid,
                "index": index,
                "outcome": Outcome.FAILED.value,
                "reason": Reason.RANK_LOST.value,
                "finish_reason": "abort",
                "text": "",
                "stop_string": None,
                "prompt_tokens": 0,
                "completion_tokens": text.tokens,
                "cached_tokens": 0,
                "discarded_tokens": 0,
                "drafted_tokens": 0,
                "accepted_tokens": 0,
                "message": LOST,
            }
        )

    def _on_receipt(self, receipt: dict[str, Any]) -> None:
        self._tell_all({"type": "receipt", "receipt": receipt})
        self._publish_receipt(receipt)

    def _on_load(self, load: dict[str, int]) -> None:
        self._load = load
        self._tell_all({"type": "load", **load})

    def _tell_all(self, message: dict[str, Any]) -> None:
        for session in list(self.sessions.values()):
            session.send(message)

    def _engine(self, body: dict[str, Any]) -> None:
        self._send_to_engine(encode(FrameKind.FRONT_IN, body))

    def _send_to_engine(self, frame: bytes) -> None:
        if self._send_engine is not None:
            self._send_engine(frame)


def _refused(
    uid: str, status: int, message: str, code: str, param: str | None = None
) -> dict[str, Any]:
    return {
        "type": "refused",
        "uid": uid,
        "status": status,
        "message": message,
        "code": code,
        "param": param,
    }
