"""``python -m stopway_engine.front``: started by ``supervise`` on the leader's pod."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys

from stopway_core import names
from stopway_core.wire import Decoder, FrameKind, WireError
from stopway_engine.config import EXIT_CONFIG, ConfigError, PodConfig, load_config
from stopway_engine.front.app import FrontApp
from stopway_engine.front.hub import Hub
from stopway_engine.front.receipts import ReceiptPublisher
from stopway_engine.http import HttpServer
from stopway_engine.modelspec import ModelError, resolve_model
from stopway_engine.tokenizer import load_codec

FLUSH_S = 1.0
LAST_WORDS_S = 2.0  # with all that follows, less than ``supervise`` gives a front to end


async def engine_connection(
    hub: Hub, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """One life of the leader rank: its first frame is its hello."""
    decoder = Decoder()
    greeted = False
    send = writer.write  # one object: the hub tells links apart by it
    try:
        while data := await reader.read(1 << 18):
            for frame in decoder.feed(data):
                if frame.kind is not FrameKind.FRONT_OUT:
                    raise WireError(f"{frame.kind.name} from the leader rank")
                if greeted:
                    hub.engine_frame(send, frame)
                else:
                    greeted = True
                    hub.engine_connected(send, frame.body)
    except (OSError, WireError) as error:
        print(f"the leader rank is lost: {error}", file=sys.stderr, flush=True)
    finally:
        hub.engine_lost(send)
        writer.close()  # a leader that leaves waits for this: what it said has been handled


def told_to_end() -> asyncio.Event:
    """Set by SIGTERM, and when ``supervise`` is gone."""
    loop = asyncio.get_running_loop()
    parent = int(os.environ["STOPWAY_PARENT_FD"])
    told = asyncio.Event()

    def end() -> None:
        loop.remove_reader(parent)  # it stays readable
        told.set()

    loop.add_signal_handler(signal.SIGTERM, end)
    loop.add_reader(parent, end)  # readable when the other end is closed
    return told


async def end_after_last_words(told: asyncio.Event, hub: Hub, server: HttpServer) -> None:
    """Once ``told``, end ``server`` as soon as all that the leader has said has been sent on.

    The ranks are gone or going by then. What their leader said last may not have been read yet, and
    a server that ends closes its sessions whatever is still queued for them.
    """
    await told.wait()
    try:
        await asyncio.wait_for(hub.last_words(), LAST_WORDS_S)
    except TimeoutError:
        print("the front ends though its last words are not sent", file=sys.stderr, flush=True)
    server.should_exit = True


async def serve(config: PodConfig) -> None:
    """Serve until SIGTERM, or until ``supervise`` is gone."""
    codec = await asyncio.to_thread(load_codec, resolve_model(config.model))
    publisher = ReceiptPublisher(config.redis_url, names.receipts_stream(config.service_uid))
    hub = Hub(config, codec, publisher.publish)
    sock = socket.create_server((config.bind_host, config.front_port), backlog=128)
    server = HttpServer(FrontApp(hub).asgi())
    ending = asyncio.create_task(end_after_last_words(told_to_end(), hub, server))
    path = os.environ["STOPWAY_FRONT_SOCKET"]
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of the front before this one
    connections = await asyncio.start_unix_server(
        lambda reader, writer: engine_connection(hub, reader, writer), path
    )
    publishing = asyncio.create_task(publisher.run())
    try:
        await server.serve(sockets=[sock])
    finally:
        connections.close()
        await publisher.flush(FLUSH_S)
        for task in (ending, publishing):
            task.cancel()
        await asyncio.gather(ending, publishing, return_exceptions=True)


def main() -> None:
    """The process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to ``supervise``, too
    try:
        config = load_config()
        asyncio.run(serve(config))
    except (ConfigError, ModelError) as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(EXIT_CONFIG)
    except OSError as error:
        print(
            f"the front cannot listen on {config.bind_host}:{config.front_port}: {error.strerror}; "
            "choose another STOPWAY_FRONT_PORT",
            file=sys.stderr,
            flush=True,
        )
        sys.exit(EXIT_CONFIG)


if __name__ == "__main__":
    main()
