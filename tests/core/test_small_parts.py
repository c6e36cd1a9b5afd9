"""Names, topology, deadlines, reasons."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stopway_core import names, topology
from stopway_core.deadlines import DeadlineHeap
from stopway_core.topology import Addresses, ServiceSpec, TopologyError
from stopway_core.types import Deadlines, Outcome, Reason, finish_reason_of, outcome_of

# --- names ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["", "a b", "a\n", "\na", "a/b", "é", "x" * 129, "a\0"])
def test_what_is_no_id(bad: str) -> None:
    assert not names.valid_id(bad)


def test_uids_name_their_gateway() -> None:
    uid = names.request_uid(0x1234, "gw7", "abc")
    assert names.valid_id(uid) and names.uid_gateway(uid) == "gw7"
    assert names.uid_gateway(names.child_uid(uid, 3)) == "gw7"
    for other in ("", "req-1-2", "res-1-gw-x", "a-b-c-d-e"):
        assert names.uid_gateway(other) == ""


def test_traceparents() -> None:
    good = f"00-{'a' * 32}-{'b' * 16}-01"
    assert names.parse_traceparent(good) == ("a" * 32, "b" * 16, True)
    assert names.parse_traceparent(good[:-1] + "0") == ("a" * 32, "b" * 16, False)
    for bad in (
        "",
        good + "\n",
        good.upper(),
        good.replace("a", "0"),
        good.replace("b", "0"),
        "01" + good[2:],
    ):
        assert names.parse_traceparent(bad) is None


def test_a_stream_belongs_to_one_service_and_group() -> None:
    streams = {names.stops_stream(s, g) for s in ("u1", "u2") for g in ("g0", "g1", "gateway")}
    assert len(streams) == 6
    assert names.gateway_stops_stream("u1") in streams


# --- topology ------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 16), st.integers(0, 3))
def test_every_rank_is_in_one_pod_of_its_group(tp: int, pp: int, per_pod: int, n: int) -> None:
    spec = ServiceSpec(groups=n, tensor=tp, pipeline=pp, ranks_per_pod=per_pod)
    if per_pod and (tp * pp) % per_pod:
        with pytest.raises(TopologyError, match="divisor"):
            topology.plan(spec)
        return
    groups = topology.plan(spec)
    assert len({group.name for group in groups}) == n
    for group in groups:
        ranks = [rank for pod in group.pods for rank in pod.ranks]
        assert ranks == list(range(tp * pp))
        assert [pod.leader for pod in group.pods] == [True] + [False] * (len(group.pods) - 1)
        assert 0 in group.pods[0].ranks
        stages = [topology.stage_of(rank, tp) for rank in ranks]
        assert stages == sorted(stages) and set(stages) == set(range(pp))


@pytest.mark.parametrize(
    "spec",
    [
        ServiceSpec(tensor=0),
        ServiceSpec(pipeline=-1),
        ServiceSpec(groups=-1),
        ServiceSpec(tensor=2, ranks_per_pod=-1),
        ServiceSpec(tensor=2, pipeline=2, ranks_per_pod=3),
    ],
)
def test_a_spec_that_fits_no_pods_is_refused_with_what_to_change(spec: ServiceSpec) -> None:
    with pytest.raises(TopologyError):
        topology.plan(spec)


def test_a_pod_has_all_settings_and_addresses_as_text() -> None:
    (group,) = topology.plan(ServiceSpec(tensor=2, ranks_per_pod=1))
    env = group.pods[1].env(Addresses("leader", "0.0.0.0", node="n", pod_uid="p"))
    assert env["STOPWAY_POD_INDEX"] == "1" and env["STOPWAY_LEADER_HOST"] == "leader"
    assert all(isinstance(v, str) for v in env.values())
    for key in topology.EngineSettings.__dataclass_fields__:
        assert f"STOPWAY_{key.upper()}" in env


# --- deadlines -----------------------------------------------------------------------------


def test_deadlines_come_due_in_order_and_once() -> None:
    heap = DeadlineHeap()
    heap.add(1, 10.0, Deadlines(queue=5.0, total=1.0))
    heap.add(2, 10.0, Deadlines(first_token=3.0))
    assert heap.next() == 11.0
    assert list(heap.due(10.9)) == []
    assert list(heap.due(15.0)) == [
        (1, Reason.DEADLINE_TOTAL),
        (2, Reason.DEADLINE_TTFT),
        (1, Reason.DEADLINE_QUEUE),
    ]
    assert heap.next() is None and list(heap.due(99.0)) == []


def test_what_is_met_or_forgotten_never_comes_due() -> None:
    heap = DeadlineHeap()
    for key in (1, 2, 3):
        heap.add(key, 0.0, Deadlines(queue=1.0, first_token=2.0, total=3.0))
    heap.met_queue(1)
    heap.met_first_token(1)
    heap.forget(2)
    assert list(heap.due(9.0)) == [
        (3, Reason.DEADLINE_QUEUE),
        (3, Reason.DEADLINE_TTFT),
        (1, Reason.DEADLINE_TOTAL),
        (3, Reason.DEADLINE_TOTAL),
    ]


def test_a_request_forgotten_while_its_first_deadline_is_handled_has_no_second() -> None:
    heap = DeadlineHeap()
    heap.add(1, 0.0, Deadlines(first_token=1.0, total=1.0))
    got = []
    for key, reason in heap.due(5.0):
        got.append(reason)
        heap.forget(key)
    assert len(got) == 1


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["add", "queue", "first", "forget", "due"])),
        max_size=30,
    )
)
def test_the_heap_is_a_sorted_list(script: list[tuple[int, str]]) -> None:
    heap, model, now = DeadlineHeap(), {}, 0.0
    used: set[int] = set()
    for key, what in script:
        now += 0.5
        if what == "add" and key not in used:
            used.add(key)
            heap.add(key, now, Deadlines(queue=1.0, first_token=2.0 + key, total=3.0))
            model[key, Reason.DEADLINE_QUEUE] = now + 1.0
            model[key, Reason.DEADLINE_TTFT] = now + 2.0 + key
            model[key, Reason.DEADLINE_TOTAL] = now + 3.0
        elif what == "queue":
            heap.met_queue(key)
            model.pop((key, Reason.DEADLINE_QUEUE), None)
        elif what == "first":
            heap.met_first_token(key)
            model.pop((key, Reason.DEADLINE_TTFT), None)
        elif what == "forget":
            heap.forget(key)
            model = {k: v for k, v in model.items() if k[0] != key}
        elif what == "due":
            due = {k: v for k, v in model.items() if v <= now}
            assert sorted(heap.due(now)) == sorted(due)
            model = {k: v for k, v in model.items() if v > now}
        assert heap.next() == (min(model.values()) if model else None)


# --- reasons -------------------------------------------------------------------------------


def test_every_reason_has_one_outcome_and_one_finish_reason() -> None:
    ended = {Reason.EOS, Reason.LENGTH, Reason.STOP_STRING, Reason.GRAMMAR_END}
    for reason in Reason:
        assert (outcome_of(reason) is Outcome.FINISHED) == (reason in ended)
        expected = "length" if reason is Reason.LENGTH else "stop" if reason in ended else "abort"
        assert finish_reason_of(reason) == expected
    assert outcome_of(Reason.RANK_LOST) is Outcome.FAILED
    assert outcome_of(Reason.DEADLINE_TOTAL) is Outcome.STOPPED
