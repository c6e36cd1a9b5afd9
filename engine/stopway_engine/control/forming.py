"""How a group comes to be: followers find the leader, prove who they are, and get one epoch.

The leader's name is resolved anew at each attempt, since a pod's address changes with the pod. The
leader's port is open only while it forms, so that nobody joins a running epoch.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stopway_core.wire import FrameKind
from stopway_engine.config import PodConfig
from stopway_engine.control import handshake
from stopway_engine.control.handshake import HandshakeError
from stopway_engine.control.loop import ControlLoop, EpochEnded
from stopway_engine.link import Link, LinkClosed

RETRY_S = 0.25
HELLO_S = 5.0  # a connection that has not said HELLO by then is closed


@dataclass(slots=True)
class Formed:
    """One epoch, as agreed: ``links`` are the followers' (leader) or the leader's (follower)."""

    epoch: int
    store_port: int
    blocks: int
    nodes: list[str]
    links: list[Link]


@dataclass(slots=True)
class _Guest:
    link: Link
    nonce: str
    since: float
    rank: int | None = None
    hello: dict[str, Any] | None = None


class LeaderForming:
    """The leader's side; ``run`` returns when every rank is in."""

    def __init__(
        self,
        config: PodConfig,
        mine: dict[str, Any],
        store_port: Callable[[], int],
        beat: Callable[[], None],
    ) -> None:
        self._config = config
        self._mine = mine
        self._store_port = store_port
        self._beat = beat
        self._guests: list[_Guest] = []
        self._selector = selectors.DefaultSelector()

    def run(self) -> Formed:
        """Wait for the followers, however long it takes. Raises ``EpochEnded`` without a port."""
        if self._config.world == 1:
            return self._welcome({})
        with self._listen() as listener:
            self._selector.register(listener, selectors.EVENT_READ, None)
            while True:
                for key, _ in self._selector.select(RETRY_S):
                    if key.data is None:
                        self._accept(listener)
                    else:
                        self._read(key.data)
                self._beat()
                self._expire()
                members = {g.rank: g for g in self._guests if g.rank is not None}
                if len(members) == self._config.world - 1:
                    return self._welcome(members)

    def _listen(self) -> socket.socket:
        config = self._config
        try:
            return socket.create_server(
                (config.bind_host, config.control_port), backlog=config.world
            )
        except OSError as error:
            raise EpochEnded(
                f"cannot listen on {config.bind_host}:{config.control_port}: {error.strerror}"
            ) from None

    def _accept(self, listener: socket.socket) -> None:
        sock, address = listener.accept()
        guest = _Guest(Link(sock, f"{address[0]}:{address[1]}"), handshake.new_nonce(), _mono())
        try:
            guest.link.send(handshake.challenge(guest.nonce))
        except LinkClosed:
            guest.link.close()
            return
        self._guests.append(guest)
        self._selector.register(sock, selectors.EVENT_READ, guest)

    def _read(self, guest: _Guest) -> None:
        config = self._config
        try:
            for frame in guest.link.frames(_mono()):
                fields = handshake.unsealed(frame, FrameKind.HELLO, config.secret, guest.nonce)
                expected = {"group": config.group, "fingerprint": self._mine["fingerprint"]}
                rank = handshake.check_hello(fields, expected, config.world)
                for other in [g for g in self._guests if g.rank == rank and g is not guest]:
                    self._drop(other)  # a newer process of that rank: the older is gone
                guest.rank, guest.hello = rank, fields
                guest.link.name = f"rank {rank}"
        except HandshakeError as error:
            ControlLoop.log(f"{guest.link.name} was refused: {error}")
            self._drop(guest)
        except LinkClosed:
            self._drop(guest)

    def _expire(self) -> None:
        for guest in list(self._guests):
            if guest.rank is None and _mono() - guest.since > HELLO_S:
                self._drop(guest)

    def _drop(self, guest: _Guest) -> None:
        if guest in self._guests:
            self._guests.remove(guest)
            self._selector.unregister(guest.link.sock)
            guest.link.close()

    def _welcome(self, members: dict[int, _Guest]) -> Formed:
        for guest in list(self._guests):
            if guest.rank is None or members.get(guest.rank) is not guest:
                self._drop(guest)
        ordered = [members[rank] for rank in range(1, self._config.world)]
        hellos = [self._mine, *[g.hello for g in ordered if g.hello is not None]]
        last = max(int(hello["last_epoch"]) for hello in hellos)
        formed = Formed(
            epoch=max(last, int(time.time() * 1000)) + 1,
            store_port=self._store_port() if members else 0,
            blocks=min(int(hello["blocks"]) for hello in hellos),
            nodes=[str(hello["node"]) for hello in hellos],
            links=[guest.link for guest in ordered],
        )
        for guest in ordered:
            assert guest.hello is not None
            self._selector.unregister(guest.link.sock)
            fields = {
                "epoch": formed.epoch,
                "store_port": formed.store_port,
                "blocks": formed.blocks,
            }
            try:
                guest.link.send(
                    handshake.sealed(
                        FrameKind.WELCOME, self._config.secret, guest.hello["nonce"], fields
                    )
                )
            except LinkClosed as closed:
                raise EpochEnded(str(closed)) from None
        self._selector.close()
        return formed


def join(config: PodConfig, mine: dict[str, Any], beat: Callable[[], None]) -> Formed:
    """A follower's side: find the leader, say HELLO, wait for WELCOME; retried until it works."""
    while True:
        beat()
        try:
            with_leader = _attempt(config, mine, beat)
        except (OSError, LinkClosed):
            with_leader = None  # not there yet, or it went: look its name up again
        except HandshakeError as error:
            ControlLoop.log(f"the leader was refused: {error}")
            with_leader = None
        if with_leader is not None:
            return with_leader
        time.sleep(RETRY_S)


def _attempt(config: PodConfig, mine: dict[str, Any], beat: Callable[[], None]) -> Formed | None:
    sock = socket.create_connection((config.leader_host, config.control_port), timeout=2.0)
    link = Link(sock, "the leader")
    nonce = handshake.new_nonce()
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_READ)
            challenged = False
            since = _mono()
            while True:
                for _ in selector.select(RETRY_S):
                    for frame in link.frames(_mono()):
                        if frame.kind is FrameKind.CHALLENGE and not challenged:
                            challenged = True
                            link.send(
                                handshake.sealed(
                                    FrameKind.HELLO,
                                    config.secret,
                                    str(frame.body["nonce"]),
                                    {**mine, "nonce": nonce},
                                )
                            )
                        else:
                            fields = handshake.unsealed(
                                frame, FrameKind.WELCOME, config.secret, nonce
                            )
                            return Formed(
                                int(fields["epoch"]),
                                int(fields["store_port"]),
                                int(fields["blocks"]),
                                [],
                                [link],
                            )
                beat()
                if not challenged and _mono() - since > HELLO_S:
                    raise LinkClosed("the leader did not send a challenge")
    except BaseException:
        link.close()
        raise


def _mono() -> float:
    return time.monotonic()
