"""The command line. Only what every command needs is imported here, so that it starts fast."""

from __future__ import annotations

import math
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from stopway_cli.errors import CliError, Exit
from stopway_cli.simulate import register as register_simulate
from stopway_core.topology import DRAFT_TOKENS_MAX, GRAMMARS_MAX

app = typer.Typer(
    help="Serve a language model, and stop what runs on it with a receipt.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no number of seconds")
    return value


def _deadline(until: str) -> Any:
    """An option for one of the deadlines."""
    return typer.Option(
        min=0.0, callback=_finite, help=f"Seconds at most until {until} [no bound]."
    )


Url = Annotated[str, typer.Option(envvar="STOPWAY_URL", help="The gateway [local stack].")]
Key = Annotated[str, typer.Option(envvar="STOPWAY_KEY", help="An API key of it.")]
Numerics = Annotated[str, typer.Option(help="fast, or invariant: neighbours change no result.")]
Policy = Annotated[str, typer.Option(help="How stops behave: native, or as another engine's do.")]
Groups = Annotated[list[str] | None, typer.Option("--group", help="Only this; repeat [all].")]
GroupsJson = Annotated[bool, typer.Option("--json", help="The answer as JSON.")]

_SECRET_HELP = "[TENANT[:admin]=]KEY; repeat for more. A bare KEY is tenant default's admin."


def finish(work: Coroutine[Any, Any, Exit]) -> None:
    """Run a command and leave with its code; a ``CliError`` is one sentence on stderr."""
    import asyncio

    try:
        code = asyncio.run(work)
    except CliError as error:
        print(f"stopway: {error.message}", file=sys.stderr)
        if error.detail:
            print(error.detail, file=sys.stderr)
        code = error.code
    except KeyboardInterrupt:
        code = Exit.INTERRUPTED
    except BrokenPipeError:
        code = Exit.FAILED
    raise typer.Exit(int(code))


@app.command()
def up(
    tensor: Annotated[int, typer.Option(min=1, help="Ranks that share each layer.")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="Stages the layers are split into.")] = 1,
    groups: Annotated[int, typer.Option(min=1, help="Replicas, each tensor x pipeline.")] = 1,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free one.")] = 8080,
    model: Annotated[str, typer.Option(help="builtin:smollm2, a GGUF file, a folder.")] = (
        "builtin:smollm2"
    ),
    model_name: Annotated[str, typer.Option(help="Its id in the API [from the model].")] = "",
    api_key: Annotated[list[str] | None, typer.Option(help=_SECRET_HELP)] = None,
    redis_url: Annotated[str, typer.Option(help="Use this Redis [start one].")] = "",
    otlp_endpoint: Annotated[str, typer.Option(help="Send spans there, by OTLP/HTTP.")] = "",
    numerics: Numerics = "fast",
    policy: Policy = "native",
    kv_blocks: Annotated[int, typer.Option(min=0, help="KV blocks per rank [choose].")] = 0,
    max_model_len: Annotated[int, typer.Option(min=0, help="Tokens [the model's].")] = 0,
    deadline_queue: Annotated[float, _deadline("a request runs")] = 0.0,
    deadline_first_token: Annotated[float, _deadline("its first token")] = 0.0,
    deadline_total: Annotated[float, _deadline("its last token")] = 0.0,
    draft_tokens: Annotated[
        int, typer.Option(min=0, max=DRAFT_TOKENS_MAX, help="Guessed ahead by n-grams [off].")
    ] = 0,
    grammars: Annotated[
        int, typer.Option(min=1, max=GRAMMARS_MAX, help="Compiled ones that are kept.")
    ] = 32,
    threads: Annotated[int, typer.Option(min=0, help="Per rank [cores / ranks].")] = 0,
    ranks_per_pod: Annotated[int, typer.Option(min=0, help="Split a group [all in one].")] = 0,
    host: Annotated[str, typer.Option(help="Where the gateway listens.")] = "127.0.0.1",
    state_dir: Annotated[Path | None, typer.Option(help="Keep logs and spans here.")] = None,
) -> None:
    """Run the whole stack here: gateway, groups, and Redis; Ctrl-C ends all of it."""
    from stopway_cli import up as command
    from stopway_cli.stack import StackConfig
    from stopway_core.policies import POLICIES
    from stopway_core.topology import EngineSettings

    _one_of("--numerics", numerics, ("fast", "invariant"))
    _one_of("--policy", policy, tuple(POLICIES))
    settings = EngineSettings(
        model=model,
        model_name=model_name or _name_of(model),
        numerics=numerics,
        policy=policy,
        threads=threads,
        kv_blocks=kv_blocks,
        max_model_len=max_model_len,
        otlp_endpoint=otlp_endpoint,
        drain_s=5.0,
        deadline_queue_s=deadline_queue,
        deadline_first_token_s=deadline_first_token,
        deadline_total_s=deadline_total,
        draft_tokens=draft_tokens,
        grammars=grammars,
    )
    config = StackConfig(
        tensor=tensor,
        pipeline=pipeline,
        groups=groups,
        ranks_per_pod=ranks_per_pod,
        host=host,
        port=port,
        settings=settings,
        api_keys=tuple(api_key or ()),
        redis_url=redis_url,
        state_dir=state_dir,
        register=True,
    )
    finish(command.serve(config))


@app.command()
def demo(
    tensor: Annotated[int, typer.Option(min=1, help="Ranks that share each layer.")] = 2,
    pipeline: Annotated[int, typer.Option(min=1, help="Stages.")] = 1,
    model: Annotated[str, typer.Option(help="What to serve.")] = "builtin:smollm2",
) -> None:
    """Stream an answer, cancel it, disconnect from another; exit 0 if all was reclaimed."""
    from stopway_cli import demo as command

    finish(command.run(tensor, pipeline, model, _name_of(model)))


@app.command()
def cancel(
    request_ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="Ids of requests.")
    ] = None,
    conversation: Annotated[str, typer.Option(help="All requests of this conversation.")] = "",
    tenant: Annotated[str, typer.Option(help="All requests of this tenant.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="All that the key reaches.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Until its blocks are reclaimed.")] = False,
    until: Annotated[str, typer.Option(help="accepted, stopped or reclaimed.")] = "",
    timeout: Annotated[float, typer.Option(min=0.0, help="Seconds to wait.")] = 10.0,
    json: Annotated[bool, typer.Option("--json", help="The stop as JSON.")] = False,
    url: Url = "",
    key: Key = "",
) -> None:
    """Stop requests and print the receipt; exit 0 once it is as far as asked."""
    from stopway_cli import cancel as command
    from stopway_cli.client import find_server

    wanted = until or ("reclaimed" if wait else "accepted")
    _one_of("--until", wanted, ("accepted", "stopped", "reclaimed"))

    async def work() -> Exit:
        target = command.target(request_ids or (), conversation, tenant, everything)
        return await command.run(target, find_server(url, key), wanted, timeout, json)

    finish(work())


@app.command()
def groups(json: GroupsJson = False, url: Url = "", key: Key = "") -> None:
    """What each group does with its requests: mode, epoch, requests and blocks. For admins."""
    from stopway_cli import groups as command
    from stopway_cli.client import find_server

    async def work() -> Exit:
        return await command.show(find_server(url, key), json)

    finish(work())


@app.command()
def pause(
    mode: Annotated[str, typer.Option(help="wait, keep or abort: what becomes of what runs.")],
    group: Groups = None,
    json: GroupsJson = False,
    url: Url = "",
    key: Key = "",
) -> None:
    """Let groups start nothing until they are resumed; exit 0 once all of them do. For admins."""
    _one_of("--mode", mode, ("wait", "keep", "abort"))
    _change("pause", {"mode": mode}, group, json, url, key)


@app.command()
def resume(group: Groups = None, json: GroupsJson = False, url: Url = "", key: Key = "") -> None:
    """Let paused groups go on. For admins."""
    _change("resume", {}, group, json, url, key)


@app.command()
def drain(group: Groups = None, json: GroupsJson = False, url: Url = "", key: Key = "") -> None:
    """Let groups end what they have and take nothing new. For admins."""
    _change("drain", {}, group, json, url, key)


def _change(
    what: str, body: dict[str, Any], group: list[str] | None, json: bool, url: str, key: str
) -> None:
    from stopway_cli import groups as command
    from stopway_cli.client import find_server

    async def work() -> Exit:
        return await command.change(find_server(url, key), what, body, tuple(group or ()), json)

    finish(work())


@app.command()
def top(
    once: Annotated[bool, typer.Option("--once", help="One picture, then end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between.")] = 1.0,
    url: Url = "",
    key: Key = "",
) -> None:
    """Requests, groups and blocks by holder, live."""
    import asyncio
    import contextlib

    from stopway_cli import top as command
    from stopway_cli.client import find_server

    async def work() -> Exit:
        with contextlib.suppress(asyncio.CancelledError):  # Ctrl-C is how one leaves it
            await command.run(find_server(url, key), once, interval)
        return Exit.OK

    finish(work())


@app.command()
def trace(
    ident: Annotated[str, typer.Argument(metavar="ID", help="Of a request, stop or trace.")],
    jaeger: Annotated[str, typer.Option(help="Ask Jaeger's query API at this URL.")] = "",
    spans_dir: Annotated[Path | None, typer.Option(help="Read spans here.")] = None,
    url: Url = "",
    key: Key = "",
) -> None:
    """The waterfall of a request or of a stop."""
    from stopway_cli import trace as command

    async def work() -> Exit:
        await command.run(ident, url, key, spans_dir, jaeger)
        return Exit.OK

    finish(work())


@app.command()
def bench(
    urls: Annotated[list[str] | None, typer.Argument(metavar="URL...", help="Servers.")] = None,
    key: Annotated[list[str] | None, typer.Option(help="One for all, or one for each.")] = None,
    model: Annotated[str, typer.Option(help="Model id [the server's first].")] = "",
    local: Annotated[bool, typer.Option("--local", help="Start a stack; it comes first.")] = False,
    tensor: Annotated[int, typer.Option(min=1, help="Of the local stack.")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="Of the local stack.")] = 1,
    turns: Annotated[bool, typer.Option("--turns", help="The core's turn cost first.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repetitions.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Throughput and stop latency of OpenAI-compatible servers; ratios are to the first."""
    from stopway_cli.bench import command

    plan = command.Plan(
        tuple(urls or ()), tuple(key or ()), model, local, tensor, pipeline, turns, quick, json
    )
    finish(command.run(plan))


register_simulate(app, finish)


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise typer.BadParameter(f"{value!r} is none of {', '.join(allowed)}", param_hint=option)


def _name_of(model: str) -> str:
    """The id under which the API serves ``model``."""
    if model == "builtin:smollm2":
        return "smollm2-135m-instruct"
    return Path(model).name.removesuffix(".gguf") or model
