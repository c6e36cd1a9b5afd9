"""``cancel``, ``top``, ``trace`` and the acts of ``demo`` against a fake gateway."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stopway_cli import cancel, demo, render, top, trace
from stopway_cli.client import Api, Server
from stopway_cli.errors import CliError, Exit
from stopway_cli.stack import LocalStack, StackConfig


def server_of(gateway: Any) -> Server:
    return Server(gateway.url, gateway.key)


def one(uid: str) -> dict[str, Any]:
    return cancel.target([uid], "", "", False)


async def start_stream(gateway: Any, wait_until: Any) -> tuple[str, asyncio.Task[list[Any]]]:
    """(uid, the task that reads it) of a stream that runs until it is stopped."""

    async def read() -> list[Any]:
        async with Api(server_of(gateway)) as api, api.chat({"max_tokens": 100_000}) as chunks:
            return [chunk async for chunk in chunks]

    task = asyncio.create_task(read())
    await wait_until(lambda: gateway.running)
    return next(iter(gateway.running)), task


async def test_cancel_prints_the_receipt(
    gateway: Any, wait_until: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    uid, reading = await start_stream(gateway, wait_until)
    assert await cancel.run(one(uid), server_of(gateway), "reclaimed", 10.0, False) is Exit.OK
    chunks = await reading
    assert chunks[-2]["choices"][0]["stop_reason"] == "client_cancel"
    shown = capsys.readouterr().out
    assert "stop-0" in shown and "reclaimed" in shown


async def test_cancel_as_json_and_a_wait_that_ran_out(
    gateway: Any, wait_until: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    uid, reading = await start_stream(gateway, wait_until)
    assert await cancel.run(one(uid), server_of(gateway), "accepted", 10.0, True) is Exit.OK
    assert json.loads(capsys.readouterr().out)["request_ids"] == [uid]
    await reading
    assert not cancel.reached("noticed", "stopped")
    assert not cancel.reached("stopped", "reclaimed")
    assert cancel.reached("already_finished", "reclaimed")


@pytest.mark.parametrize(
    ("given", "target"),
    [
        ((["a", "b"], "", "", False), {"request_ids": ["a", "b"]}),
        (([], "c1", "", False), {"conversation": "c1"}),
        (([], "", "t", False), {"tenant": "t"}),
        (([], "", "", True), {"all": True}),
    ],
)
async def test_many_are_stopped_at_once(
    gateway: Any, capsys: pytest.CaptureFixture[str], given: Any, target: dict[str, Any]
) -> None:
    aim = cancel.target(*given)
    assert await cancel.run(aim, server_of(gateway), "reclaimed", 5.0, False) is Exit.OK
    assert gateway.stop_bodies == [{**target, "wait": "reclaimed", "timeout": 5.0}]
    assert "reclaimed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "given", [([], "", "", False), (["a"], "", "", True), ([], "c", "t", False)]
)
def test_a_stop_has_one_target(given: Any) -> None:
    with pytest.raises(CliError, match="by one of") as caught:
        cancel.target(*given)
    assert caught.value.code is Exit.USAGE


async def test_an_unknown_request_is_what_the_server_says(gateway: Any) -> None:
    with pytest.raises(CliError, match="404: no request nobody") as caught:
        await cancel.run(one("nobody"), server_of(gateway), "accepted", 10.0, False)
    assert caught.value.code is Exit.SERVER


async def test_top_shows_requests_and_blocks_by_holder(
    gateway: Any, wait_until: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    uid, reading = await start_stream(gateway, wait_until)
    gateway.held = 5
    await top.run(server_of(gateway), True, 1.0)
    shown = capsys.readouterr().out
    await cancel.run(one(uid), server_of(gateway), "reclaimed", 10.0, False)
    await reading
    assert uid in shown and "running" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert ["g0", "cache", "10", "10"] in rows
    assert ["g0", "request", "1", "5"] in rows
    assert ["g0", "-", "7", "1", "0", "85", "5", "10"] in rows


async def test_trace_of_a_stop_and_of_its_request(
    gateway: Any, wait_until: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    uid, reading = await start_stream(gateway, wait_until)
    await cancel.run(one(uid), server_of(gateway), "reclaimed", 10.0, False)
    await reading
    capsys.readouterr()
    for ident in ("stop-0", uid, gateway.trace_id):
        await trace.run(ident, gateway.url, gateway.key, gateway.spans_dir, "")
        shown = capsys.readouterr().out
        assert gateway.trace_id in shown
        for rank in range(2):
            assert f"stop.reclaim [rank {rank}]" in shown


async def test_trace_says_what_is_missing(gateway: Any, tmp_path: Path) -> None:
    with pytest.raises(CliError, match="no request or stop of the last 10 minutes"):
        await trace.run("nobody", gateway.url, gateway.key, tmp_path, "")
    with pytest.raises(CliError, match="no spans of trace"):
        await trace.run("cd" * 16, gateway.url, gateway.key, tmp_path, "")
    with pytest.raises(CliError, match="--jaeger URL or --spans-dir DIR"):
        await trace.run("cd" * 16, gateway.url, gateway.key, None, "")
    with pytest.raises(CliError, match="Jaeger's query API"):
        await trace.run("cd" * 16, gateway.url, gateway.key, None, "http://127.0.0.1:1")


def acts(gateway: Any) -> demo.Demo:
    stack = SimpleNamespace(config=StackConfig(tensor=2), spans_dir=gateway.spans_dir)
    api = Api(server_of(gateway))
    return demo.Demo(api, cast("LocalStack", stack), render.console(), "fake-model")


async def test_the_demo_proves_what_it_says(
    gateway: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    played = acts(gateway)
    async with played.api:
        assert await played.play() is Exit.OK
    shown = capsys.readouterr().out
    assert "g0: free 90 + cached 10 = 100, of 100 in the ledger" in shown
    assert "client_disconnect" in shown
    assert shown.count("reclaimed at") == 0
    assert "everything was reclaimed" in shown
    assert "stop.in_flight [rank 1]" in shown


async def test_the_demo_fails_when_a_rank_says_nothing(
    gateway: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.ranks_answering = 1
    played = acts(gateway)
    async with played.api:
        assert await played.play() is Exit.FAILED
    assert "not proved: g0 has 2 ranks, its receipt 1" in capsys.readouterr().out


async def test_the_demo_fails_when_a_block_stays_held(
    gateway: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    balance = demo.Demo._balance

    async def hasty(played: demo.Demo) -> None:
        monkeypatch.setattr(demo, "_WAIT_S", 0.3)
        await balance(played)

    monkeypatch.setattr(demo.Demo, "_balance", hasty)
    gateway.held = 3
    played = acts(gateway)
    async with played.api:
        assert await played.play() is Exit.FAILED
    assert "still shows something running or held" in capsys.readouterr().out
