"""The two commands' options. What they run is imported when they run."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from stopway_cli.errors import Exit

Finish = Callable[[Coroutine[Any, Any, Exit]], None]

_COUNTS = "lognormal:MEDIAN:SIGMA, uniform:LOW:HIGH, constant:N or values:A,B,C"
_LENGTHS = f"{_COUNTS} tokens."
_TRACE = "CSV instead: arrival,prompt,output[,cancel][,priority][,choices]."


def register(app: typer.Typer, finish: Finish) -> None:
    """Add ``sim`` and ``compare`` to ``app``; ``finish`` runs a command and leaves."""

    @app.command()
    def sim(
        policy: Annotated[str, typer.Option(help="Whose way to stop.")] = "native",
        scenario: Annotated[str, typer.Option(help="Start from a named one (see compare).")] = "",
        groups: Annotated[int | None, typer.Option(help="Replicas [4].")] = None,
        split: Annotated[
            bool, typer.Option("--split", help="Pairs of prefill and decode groups.")
        ] = False,
        cost: Annotated[Path | None, typer.Option(help="A cost model as JSON.")] = None,
        cost_field: Annotated[
            list[str] | None,
            typer.Option(help="NAME=VALUE of the cost model (tensor=2, blocks=1024); repeat."),
        ] = None,
        requests: Annotated[int | None, typer.Option(help="How many [1000].")] = None,
        rate: Annotated[
            float | None, typer.Option(help="Poisson arrivals a second, of all [20].")
        ] = (None),
        clients: Annotated[
            int | None, typer.Option(help="A closed loop of so many instead.")
        ] = None,
        think: Annotated[float | None, typer.Option(help="Seconds a client thinks [0].")] = None,
        prompt: Annotated[str, typer.Option(help=f"{_LENGTHS} [lognormal:256:0.8]")] = "",
        output: Annotated[str, typer.Option(help=f"{_LENGTHS} [lognormal:128:0.8]")] = "",
        shared: Annotated[
            float | None, typer.Option(help="Share with a common prefix [0].")
        ] = None,
        prefixes: Annotated[
            int | None, typer.Option(help="Common prefixes, as likely [4].")
        ] = None,
        prefix_tokens: Annotated[int | None, typer.Option(help="Of each [512].")] = None,
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
        trace: Annotated[Path | None, typer.Option(help=_TRACE)] = None,
        deadline_queue: Annotated[float | None, typer.Option(help="Seconds to leave it.")] = None,
        deadline_first_token: Annotated[float | None, typer.Option(help="Seconds to it.")] = None,
        deadline_total: Annotated[float | None, typer.Option(help="Seconds to the end.")] = None,
        cancel: Annotated[
            float | None, typer.Option(help="Share given up, one by one [0].")
        ] = None,
        cancel_after: Annotated[
            float | None, typer.Option(help="Exponential, mean seconds after arrival [2].")
        ] = None,
        cancel_after_tokens: Annotated[
            float | None, typer.Option(help="Exponential, mean tokens received; instead.")
        ] = None,
        disconnects: Annotated[
            float | None, typer.Option(help="Share of those given up that just go away [0.5].")
        ] = None,
        storm: Annotated[
            list[str] | None, typer.Option(help="AT:SHARE: so many of all alive give up; repeat.")
        ] = None,
        lose_rank: Annotated[
            list[str] | None, typer.Option(help="AT:GROUP:DOWN_S: its epoch ends; repeat.")
        ] = None,
        redis_down: Annotated[
            list[str] | None, typer.Option(help="FROM:TO: stops go past it; repeat.")
        ] = None,
        host_loads: Annotated[
            str, typer.Option(help="PER_S:BLOCKS:SECONDS, Poisson, of each group.")
        ] = "",
        check: Annotated[int, typer.Option(help="Groups with a follower to compare with.")] = 0,
        seed: Annotated[int, typer.Option(help="The same seed, the same report.")] = 1,
        processes: Annotated[int, typer.Option(min=1, help="To simulate cells in.")] = 2,
        json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
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
            cost_fields=tuple(cost_field or ()),
            requests=requests,
            rate=rate,
            clients=clients,
            think_s=think,
            prompt=prompt,
            output=output,
            shared=shared,
            prefixes=prefixes,
            prefix_tokens=prefix_tokens,
            follow_ups=follow_ups,
            priorities=tuple(priority or ()),
            choices=choices,
            trace=trace,
            deadlines=(deadline_queue, deadline_first_token, deadline_total),
            cancel=cancel,
            cancel_after_s=cancel_after,
            cancel_after_tokens=cancel_after_tokens,
            disconnects=disconnects,
            storms=tuple(storm or ()),
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
            typer.Option(help="cancel-storm, memory-pressure, long-prompts or pd-split."),
        ] = "cancel-storm",
        policy: Annotated[
            list[str] | None, typer.Option(help="Only these; repeat [all six].")
        ] = None,
        groups: Annotated[int, typer.Option(min=1, help="Replicas.")] = 4,
        requests: Annotated[int, typer.Option(min=1, help="How many.")] = 2000,
        trace: Annotated[Path | None, typer.Option(help=_TRACE)] = None,
        cost: Annotated[Path | None, typer.Option(help="A cost model as JSON.")] = None,
        seed: Annotated[int, typer.Option(help="The same seed, the same report.")] = 1,
        processes: Annotated[int, typer.Option(min=1, help="To simulate cells in.")] = 2,
        json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
        html: Annotated[Path | None, typer.Option(help="Write a report with plots.")] = None,
    ) -> None:
        """Six ways to stop on one simulated workload, side by side."""
        from stopway_cli.simulate import running
        from stopway_cli.simulate.options import Options

        options = Options(
            scenario=scenario, groups=groups, requests=requests, trace=trace, cost=cost
        )
        finish(running.compare(options, tuple(policy or ()), seed, processes, json, html))
