"""The queue is a sorted list: by priority, the started before the others, and those by arrival."""

from hypothesis import given
from hypothesis import strategies as st

from stopway_core.requests import Choice
from stopway_core.types import SamplingParams, Submission
from stopway_core.waiting import WaitingQueue


def choice(key: int, priority: int = 0) -> Choice:
    submission = Submission(f"r{key}", 1, "t", (1,), SamplingParams(), 0.0, priority=priority)
    return Choice(key, submission, 0, 0.0, 10)


def drain(queue: WaitingQueue, *, started: bool = False) -> list[int]:
    keys = []
    while (head := queue.head(started=started)) is not None:
        keys.append(head.key)
        assert queue.remove(head)
    return keys


def test_smaller_priorities_first_and_the_started_before_the_others_of_theirs() -> None:
    queue = WaitingQueue()
    queue.push(choice(1, 1))
    queue.push(choice(2, 0))
    queue.push_front(choice(3, 1))
    queue.push_front(choice(4, 1))
    queue.push(choice(5, -2))
    assert len(queue) == 5 and drain(queue) == [5, 2, 4, 3, 1]
    assert len(queue) == 0 and queue.head() is None


def test_the_started_alone() -> None:
    queue = WaitingQueue()
    queue.push(choice(1))
    queue.push_front(choice(2, 3))
    assert drain(queue, started=True) == [2] and len(queue) == 1


def test_who_is_not_there_is_not_removed() -> None:
    queue = WaitingQueue()
    queue.push(choice(1))
    assert not queue.remove(choice(2)) and not queue.remove(choice(3, 1)) and len(queue) == 1


def test_an_heir_takes_the_place_in_either_line() -> None:
    queue = WaitingQueue()
    made = [choice(key) for key in range(4)]
    queue.push(made[0])
    queue.push(made[1])
    queue.push_front(made[2])
    queue.push_front(made[3])
    heirs = [choice(10), choice(11)]
    assert queue.replace(made[0], heirs[0]) and queue.replace(made[2], heirs[1])
    assert not queue.replace(choice(7), choice(12)) and not queue.replace(choice(8, 5), choice(13))
    assert len(queue) == 4 and drain(queue) == [3, 11, 10, 1]


def test_the_heir_of_one_that_had_started_stands_among_those_that_had() -> None:
    queue = WaitingQueue()
    first, heir = choice(1), choice(2)
    first.preemptions = 1
    queue.push(first)
    assert queue.replace(first, heir)
    assert queue.head(started=True) is heir and queue.head() is heir
    assert queue.remove(heir) and len(queue) == 0 and queue.head(started=True) is None


@given(
    st.lists(
        st.tuples(st.sampled_from(["push", "front", "remove", "head"]), st.integers(0, 7)),
        max_size=40,
    )
)
def test_it_is_a_sorted_list(script: list[tuple[str, int]]) -> None:
    queue = WaitingQueue()
    made = [choice(key, key % 3) for key in range(8)]
    lines: dict[int, tuple[list[int], list[int]]] = {p: ([], []) for p in range(3)}
    for what, key in script:
        started, others = lines[key % 3]
        inside = key in started + others
        if what == "push" and not inside:
            queue.push(made[key])
            others.append(key)
        elif what == "front" and not inside:
            queue.push_front(made[key])
            started.insert(0, key)
        elif what == "remove":
            assert queue.remove(made[key]) == inside
            for line in (started, others):
                if key in line:
                    line.remove(key)
        order = [key for line in lines.values() for key in line[0] + line[1]]
        head = queue.head()
        assert (head and head.key) == (order[0] if order else None) and len(queue) == len(order)
