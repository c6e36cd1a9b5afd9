"""What a front stands between, scripted: a gateway's session and the leader rank; and its codec."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from stopway_core.wire import Decoder, Frame, FrameKind
from stopway_engine.front.hub import Hub
from stopway_engine.tokenizer import Detokenizer

SECRET = "0123456789abcdef"


class Codec:
    """One token for each byte."""

    vocab_size = 256
    piece_bytes_max = 1

    def encode(self, text: str, special: bool = False, bos: bool = False) -> list[int]:
        return list(text.encode())

    def detokenizer(self) -> Detokenizer:
        return Detokenizer([bytes([value]) for value in range(256)])


@dataclass
class FakeSession:
    gateway: str = "gw"
    lease: str = "gw/1"
    lost: bool = False
    sent: list[dict[str, Any]] = field(default_factory=list)

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def close(self) -> None: ...

    async def flushed(self) -> None: ...

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.sent if message["type"] == kind]


class Engine:
    """The leader rank's end: what it was told, and what it says."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._decoder = Decoder()
        self.link = self.take  # one object, as a link has
        self.told: list[Any] = []

    def take(self, data: bytes) -> None:
        self.told += [frame.body for frame in self._decoder.feed(data)]

    def connect(self, epoch: int, mode: str = "running") -> None:
        self.told.clear()
        hello = {"epoch": epoch, "max_model_len": 100, "total_blocks": 9, "draining": False}
        self._hub.engine_connected(self.link, {"hello": hello, "mode": mode})

    def say(self, **body: Any) -> None:
        self._hub.engine_frame(self.link, Frame(FrameKind.FRONT_OUT, 1, 1, body, []))

    def leave(self) -> None:
        self._hub.engine_lost(self.link)

    @property
    def submits(self) -> list[dict[str, Any]]:
        return [body["submit"] for body in self.told if "submit" in body]

    @property
    def modes(self) -> list[str]:
        return [body["mode"] for body in self.told if "mode" in body]


def submit(uid: str, **fields: Any) -> dict[str, Any]:
    return {
        "type": "submit",
        "uid": uid,
        "attempt": 1,
        "tenant": "t",
        "n": 1,
        "prompt": {"text": "hi"},
        "params": {"max_tokens": 5},
        "minted_at": time.time(),
        "epoch": 1,
        **fields,
    }
