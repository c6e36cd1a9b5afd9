"""What a world is made of, drawn from its seed."""

from __future__ import annotations

from dataclasses import dataclass

from stopway_core.config import NO_DEADLINES, PlannerConfig
from stopway_core.events import Mode
from stopway_core.policies import POLICIES
from stopway_core.types import Deadlines, Reason, SamplingParams, Stop, Submission, Target
from stopway_sim.choices import Chooser
from stopway_sim.group import GroupShape

START_S = 1_000_000.0  # Unix time at which simulated time begins
MS = 1_000  # microseconds

TENANTS = ("acme", "zeta")
GRAMMARS = ("2", "3", "5:4", "4:9", "3:2", "2:0", "7:0", "1", "no number")
"""Texts of ``sampling.parse``: two allow nothing, and two can't be compiled."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Sizes and fault rates of one world. Times in microseconds, rates in percent."""

    shape: GroupShape
    window: int
    batch_tokens: int
    max_running: int
    requests: int
    span_us: int  # arrivals and stops fall into it
    step_us_max: int
    link_us_max: int
    bus_drop: int
    bus_duplicate: int
    bus_us_max: int
    post_drop: int
    stop_rate: int
    deadline_rate: int
    disconnects: int
    deaths: int
    loads: int
    load_blocks: int
    drain: bool
    policy: str = "native"
    draft_tokens: int = 0
    grammar_rate: int = 0
    compile_us_max: int = 1_000
    priorities: int = 1
    pauses: int = 0
    ambush: int = 0  # how often something happens to one who is where few are for long
    skew_us_max: int = 0  # between the clocks of two ranks
    alone: bool = True  # whether any request fits beside the off-queue writers
    deadlines: Deadlines = NO_DEADLINES  # the service's

    @property
    def positions(self) -> int:
        """Tokens that one request may have."""
        return (self.shape.blocks - self.alone * self.load_blocks) * self.shape.block_size

    def planner_config(self) -> PlannerConfig:
        """The bounds of the planner; token 0 is the end of sequence."""
        return PlannerConfig(
            max_model_len=self.positions,
            eos_ids=frozenset({0}),
            max_running=self.max_running,
            max_waiting=64,
            max_batch_tokens=self.batch_tokens,
            stages=self.shape.pipeline,
            window=self.window,
            draft_tokens=self.draft_tokens,
            deadlines=self.deadlines,
            policy=POLICIES[self.policy],
        )


def draw(chooser: Chooser) -> Scenario:
    """A random world, small enough that things collide in it."""
    pick, chance = chooser.pick, chooser.chance
    faulty = chance(80)
    tight = chance(25)  # few blocks, many requests, long steps: much is preempted in flight
    loads = pick((0, 4)) if tight else pick((0, 0, 3))
    size = pick((2, 4)) if tight else pick((2, 4, 4, 8))
    drafts = pick((0, 0, 2, 4))
    pipeline = pick((2, 3)) if tight else pick((1, 1, 2, 2, 3))
    shape = GroupShape(
        tensor=pick((1, 1, 2)),
        pipeline=pipeline,
        blocks=pick((8, 12)) if tight else pick((8, 12, 20, 40)),
        block_size=size,
        vocab=pick((3, 5)) if drafts else pick((12, 40)),  # few: n-grams come again
        grammars=pick((1, 2, 4)),
        prefix_cache=chance(85),
    )
    return Scenario(
        shape=shape,
        window=pick((1, 2, 2)) if pipeline == 1 else pick((1, pipeline, pipeline)),
        batch_tokens=64 if tight else pick((4, 8, 16, 64)),
        max_running=8 if tight else pick((2, 4, 8, 16)),
        requests=chooser.between(8 if tight else 2, 14),
        span_us=pick((10, 40, 120)) * MS,
        step_us_max=5000 if tight else pick((200, 1000, 5000)),
        link_us_max=pick((50, 500, 3000)),
        bus_drop=pick((0, 20, 60, 100)) if faulty else 0,
        bus_duplicate=pick((0, 30)) if faulty else 0,
        bus_us_max=pick((500, 5000, 80_000)),
        post_drop=pick((0, 50)) if faulty else 0,
        stop_rate=pick((20, 60, 100)),
        deadline_rate=pick((0, 30)),
        disconnects=pick((0, 0, 1, 2)) if faulty else 0,
        deaths=pick((0, 0, 0, 1)) if faulty else 0,
        loads=loads,
        load_blocks=2 if loads else 0,
        drain=chance(8),
        policy=pick(tuple(POLICIES)) if chance(40) else "native",
        draft_tokens=drafts,
        grammar_rate=pick((0, 0, 30, 70)),
        compile_us_max=pick((300, 3_000, 20_000)),
        priorities=pick((1, 1, 3)),
        pauses=pick((0, 0, 0, 1, 3)),
        ambush=pick((0, 5, 20)),
        skew_us_max=pick((0, 1_000_000)) if faulty else 0,
        alone=chance(25 if tight else 60),
        deadlines=_deadlines(chooser, 60, 40_000) if chance(15) else NO_DEADLINES,
    )


def _deadlines(chooser: Chooser, rate: int, longest_us: int) -> Deadlines:
    def limit() -> float | None:
        return chooser.between(500, longest_us) / 1e6 if chooser.chance(rate) else None

    return Deadlines(queue=limit(), first_token=limit(), total=limit())


def draw_pause(chooser: Chooser, span_us: int) -> tuple[int, Mode, int]:
    """(when, what, until when): an admin pauses the group, and resumes it."""
    at = chooser.between(0, span_us)
    mode = chooser.pick((Mode.FROZEN, Mode.FROZEN, Mode.WAITING, Mode.ABORTED, Mode.DRAINING))
    return at, mode, at + chooser.between(500, 30 * MS)


def draw_prompt(scenario: Scenario, chooser: Chooser) -> tuple[int, ...]:
    """A prompt from few families, so that prefixes are shared; now and then one too long."""
    vocab = scenario.shape.vocab
    longest = scenario.positions - 1
    if chooser.chance(4):
        length = chooser.between(longest + 1, longest + 20)
    else:
        length = chooser.between(1, min(longest, 30))
    family = chooser.below(3)
    shared = chooser.between(0, length)
    body = [(family * 5 + 3 * i) % vocab for i in range(shared)]
    return tuple(body + [chooser.below(vocab) for _ in range(length - shared)])


def draw_submission(
    scenario: Scenario, chooser: Chooser, index: int, at_us: int, gateway: str
) -> Submission:
    """One request."""
    params = SamplingParams(
        max_tokens=chooser.between(1, 24),
        min_tokens=chooser.pick((0, 0, 0, 4)),
        temperature=0.0,
        ignore_eos=chooser.chance(80 if scenario.draft_tokens else 30),
        stop_token_ids=(chooser.below(scenario.shape.vocab),) if chooser.chance(20) else (),
    )
    minted = START_S + at_us / 1e6 - (45.0 if chooser.chance(3) else 0.0)
    return Submission(
        uid=f"req-{index:x}-{gateway}-{index}",
        attempt=1,
        tenant=chooser.pick(TENANTS),
        prompt=draw_prompt(scenario, chooser),
        params=params,
        minted_at=minted,
        choices=chooser.pick((1, 1, 1, 2, 4)),
        priority=chooser.below(scenario.priorities),
        grammar=chooser.pick(GRAMMARS) if chooser.chance(scenario.grammar_rate) else "",
        deadlines=_deadlines(chooser, scenario.deadline_rate, 30_000),
        conversation=f"conv-{chooser.below(3)}",
        salt=chooser.pick(("", "", "s")),
        gateway=gateway,
        traceparent=f"00-{index + 1:032x}-{index + 1:016x}-01",
    )


def draw_stop(
    chooser: Chooser, index: int, submission: Submission, others: list[Submission], at_us: int
) -> Stop:
    """A stop, most of them of ``submission``; some by selector, foreign, of many, of nobody."""
    kind = chooser.below(20)
    admin = chooser.chance(20)
    tenant = submission.tenant if chooser.chance(85) else chooser.pick(TENANTS)
    if kind == 0:
        target = Target(conversation=submission.conversation)
    elif kind == 1:
        target = Target(tenant=tenant)
    elif kind == 2:
        target = Target(everything=True)
    elif kind == 3:
        target = Target(uids=(f"req-nobody-{index}",))
    elif kind == 4:
        target = Target(uids=tuple(dict.fromkeys(s.uid for s in others)))
    elif kind == 5 and submission.choices > 1:
        target = Target(uids=(f"{submission.uid}.{chooser.below(submission.choices)}",))
    else:
        target = Target(uids=(submission.uid,))
    reason = Reason.ADMIN if admin else Reason.CLIENT_CANCEL
    return Stop(
        stop_id=f"stop-{index}",
        target=target,
        reason=reason,
        tenant=tenant,
        admin=admin,
        issued_at=START_S + at_us / 1e6,
        traceparent=submission.traceparent,
    )
