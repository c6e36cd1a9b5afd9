"""The two commands' options. What they run is imported when they run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from stopway_cli.errors import Exit

Finish = Callable[[Coroutine[Any, Any, Exit]], None]

_COUNTS = "lognormal:MEDIAN:SIGMA, uniform:LOW:HIGH, constant:N or values:A,B,C"
_LENGTHS = f"{_COUNTS} tokens."
_TRACE = "CSV instead: arrival,prompt,output[,cancel][,priority][,choices]."
_NAMES = "native, vllm, sglang, llamacpp, tensorrt-llm or deepinfer"
_SCENARIOS = "cancel-storm, memory-pressure, long-prompts or pd-split"


def _policies(given: Any) -> Any:
    """A callback: each name, or the one, must be a policy's."""
    from stopway_core.policies import POLICIES

    return _known(given, POLICIES)


def _scenario(given: str) -> str:
    from stopway_sim.fleet import SCENARIOS

    _known(given, SCENARIOS)
    return given


def _known(given: Any, names: Collection[str]) -> Any:
    for name in [given] if isinstance(given, str) else given or ():
        if name and name not in names:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(names)}")
    return given


Cost = Annotated[
    Path | None, typer.Option(help="Fields of the cost model as JSON, instead of the scenario's.")
]
CostField = Annotated[
    list[str] | None,
    typer.Option(help="NAME=VALUE of the cost model (tensor=2, blocks=1024); repeat."),
]
Trace = Annotated[Path | None, typer.Option(help=_TRACE)]
Seed = Annotated[int, typer.Option(help="The same seed, the same report.")]
Processes = Annotated[int, typer.Option(min=1, help="That simulate groups, side by side.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document.")]


def _deadline(until: str) -> Any:
    return typer.Option(help=f"Seconds at most {until} [no bound].")


def register(app: typer.Typer, finish: Finish) -> None:
    """Add ``sim`` and ``compare`` to ``app``; ``finish`` runs a command and leaves."""

    @app.command()
    def sim(
        policy: Annotated[
            str, typer.Option(callback=_policies, help=f"Whose way to stop: {_NAMES}.")
        ] = "native",
        scenario: Annotated[
            str, typer.Option(callback=_scenario, help=f"Start from one: {_SCENARIOS}.")
        ] = "",
        groups: Annotated[int | None, typer.Option(min=1, help="Replicas [4].")] = None,
        split: Annotated[
            bool, typer.Option("--split", help="Pairs of prefill and decode groups.")
        ] = False,
        cost: Cost = None,
        cost_field: CostField = None,
        requests: Annotated[int | None, typer.Option(min=1, help="How many [1000].")] = None,
        rate: Annotated[
            float | None, typer.Option(help="Poisson arrivals a second, of all [20].")
        ] = None,
        clients: Annotated[
            int | None, typer.Option(help="A closed loop of so many instead of a rate.")
        ] = None,
        think: Annotated[float | None, typer.Option(help="Seconds a client thinks [0].")] = None,
        prompt: Annotated[str, typer.Option(help=f"{_LENGTHS} [lognormal:256:0.8]")] = "",
        output: Annotated[str, typer.Option(help=f"{_LENGTHS} [lognormal:128:0.8]")] = "",
        shared: Annotated[
            float | None, typer.Option(help="Share of prompts that begin with a common text [0].")
        ] = None,
        prefixes: Annotated[
            int | None, typer.Option(help="How many common texts there are, each as likely [4].")
        ] = None,
        prefix_tokens: Annotated[
            int | None, typer.Option(help="Tokens of each common text [512].")
        ] = None,
        follow_ups: Annotated[
            float | None, typer.Option(help="Share that continues a conversation [0].")
        ] = None,
        priority: Annotated[
            list[str] | None,
            typer.Option(help="LEVEL:SHARE of all, the rest has 0; smaller goes first; repeat."),
        ] = None,
        choices: Annotated[
            str, typer.Option(help=f"Answers to a request: {_COUNTS} [constant:1]")
        ] = "",
        trace: Trace = None,
        deadline_queue: Annotated[float | None, _deadline("in the queue")] = None,
        deadline_first_token: Annotated[float | None, _deadline("until the first token")] = None,
        deadline_total: Annotated[float | None, _deadline("until the last token")] = None,
        cancel: Annotated[
            float | None, typer.Option(help="Share given up, one by one [0].")
        ] = None,
        cancel_after: Annotated[
            float | None,
            typer.Option(
                help="When: exponential, with a mean of so many seconds after arrival [2]."
            ),
        ] = None,
        cancel_after_tokens: Annotated[
            float | None,
            typer.Option(
                help="When instead: after an exponential number of tokens with this mean."
            ),
        ] = None,
        disconnects: Annotated[
            float | None, typer.Option(help="Share of those given up that just go away [0.5].")
        ] = None,
        storm: Annotated[
            list[str] | None, typer.Option(help="AT:SHARE: so many of all alive give up; repeat.")
        ] = None,
        lose_rank: Annotated[
            list[str] | None,
            typer.Option(help="AT:GROUP:DOWN_S: a rank dies, and is back after DOWN_S; repeat."),
        ] = None,
        redis_down: Annotated[
            list[str] | None, typer.Option(help="FROM:TO, seconds: no stop goes by Redis; repeat.")
        ] = None,
        host_loads: Annotated[
            str,
            typer.Option(
                help="PER_S:BLOCKS:SECONDS: KV comes from host memory, Poisson, of each group."
            ),
        ] = "",
        check: Annotated[
            int, typer.Option(help="So many groups prove every turn on a second replica.")
        ] = 0,
        seed: Seed = 1,
        processes: Processes = 2,
        json: Json = False,
    ) -> None:
        """Simulate a fleet: the real planner of every group, with modelled times.

        Arrivals are Poisson (exponential gaps); lengths, cancels and storms are drawn as said
        with each option, every request from the seed and its number alone. Requests are routed
        first, by conversation and then by an estimate of outstanding tokens; groups are then
        simulated apart from each other.
        """
        from stopway_cli.simulate import running
        from stopway_cli.simulate.options import Options

        options = Options(
            scenario=scenario,
            groups=groups,
            split=split,
            cost=cost,
            cost_field=tuple(cost_field or ()),
            requests=requests,
            rate=rate,
            clients=clients,
            think=think,
            prompt=prompt,
            output=output,
            shared=shared,
            prefixes=prefixes,
            prefix_tokens=prefix_tokens,
            follow_ups=follow_ups,
            priority=tuple(priority or ()),
            choices=choices,
            trace=trace,
            deadline_queue=deadline_queue,
            deadline_first_token=deadline_first_token,
            deadline_total=deadline_total,
            cancel=cancel,
            cancel_after=cancel_after,
            cancel_after_tokens=cancel_after_tokens,
            disconnects=disconnects,
            storm=tuple(storm or ()),
            lose_rank=tuple(lose_rank or ()),
            redis_down=tuple(redis_down or ()),
            host_loads=host_loads,
            check=check,
        )
        finish(running.sim(options, policy, seed, processes, json))

    @app.command()
    def compare(
        scenario: Annotated[
            str,
            typer.Option(
                callback=_scenario, help=f"{_SCENARIOS} [cancel-storm; of a trace: none]."
            ),
        ] = "",
        policy: Annotated[
            list[str] | None,
            typer.Option(callback=_policies, help=f"Only this: {_NAMES}; repeat [all six]."),
        ] = None,
        groups: Annotated[int | None, typer.Option(min=1, help="Replicas [4].")] = None,
        requests: Annotated[int | None, typer.Option(min=1, help="How many [2000].")] = None,
        trace: Trace = None,
        cost: Cost = None,
        cost_field: CostField = None,
        seed: Seed = 1,
        processes: Processes = 2,
        json: Json = False,
        html: Annotated[Path | None, typer.Option(help="Write a report with plots.")] = None,
    ) -> None:
        """Six ways to stop on one simulated workload, side by side.

        The scenarios: in cancel-storm 15 % of requests are given up one by one, and three times
        60 % of all alive. In memory-pressure blocks are few and answers long: preemption. In
        long-prompts 40 % of prompts of 12,000 tokens are given up within their prefill. In
        pd-split pairs of a prefill and a decode group transfer KV.

        With --trace alone nothing is given up but what the file says. With --scenario, too, its
        storms, host loads and costs come on top.
        """
        from stopway_cli.simulate import running
        from stopway_cli.simulate.options import Options

        options = Options(
            scenario=scenario,
            groups=groups,
            requests=requests,
            trace=trace,
            cost=cost,
            cost_field=tuple(cost_field or ()),
        )
        finish(running.compare(options, tuple(policy or ()), seed, processes, json, html))
