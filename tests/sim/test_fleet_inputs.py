"""What the fleet reads: cost models, traces, measurements; and what it says of bad ones."""

from __future__ import annotations

import json
from random import Random

import pytest

from stopway_sim.fleet import (
    CostModel,
    FleetError,
    SmallRun,
    beside,
    calibrate,
    read_trace,
)
from stopway_sim.fleet.cost import curve


def test_a_curve_is_linear_between_its_points_and_beyond() -> None:
    points = ((10, 1.0), (20, 3.0))
    assert [curve(points, x) for x in (0, 5, 10, 15, 20, 30)] == [0.0, 0.5, 1.0, 2.0, 3.0, 5.0]
    assert curve(((4, 2.0),), 8) == 4.0


def test_a_cost_model_travels_as_json() -> None:
    model = CostModel(tensor=2, pipeline=2, decode=((8, 0.001),), blocks=100)
    assert CostModel.loads(json.dumps(model.to_json())) == model
    assert CostModel.loads("{}") == CostModel()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "JSON object"),
        ('{"blokcs": 4}', "unknown field 'blokcs'; known are tensor"),
        ('{"blocks": 4.5}', "blocks is 4.5; give a whole number"),
        ('{"blocks": 0}', "blocks is 0; give 1 to"),
        ('{"pipeline": 100000}', "pipeline is 100000; give 1 to 1024"),
        ('{"base_s": "x"}', "base_s is 'x'; give a number"),
        ('{"base_s": -1}', "give seconds"),
        ('{"decode": []}', "decode has no points"),
        ('{"decode": [[4, 0.2], [8, 0.1]]}', "decode must rise"),
        ('{"decode": [4]}', "list of .amount, seconds. pairs"),
        ('{"base_s": 0, "decode": [[1, 0]]}', "takes no time"),
    ],
)
def test_cost_models_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(FleetError, match=message):
        CostModel.loads(text)


def test_a_trace_is_read_by_its_header() -> None:
    lines = ["output, arrival,prompt,cancel", "5,2.5,100,4", "", "7,0.5,20,"]
    late, early = sorted(read_trace(lines, "t.csv", 4096), key=lambda s: -s.arrival_s)
    assert (late.arrival_s, late.own, late.output, late.cancel_after_s) == (2.5, 100, 5, 1.5)
    assert (early.arrival_s, early.own, early.output, early.cancel_after_s) == (0.5, 20, 7, None)
    assert [s.arrival_s for s in read_trace(lines, "t.csv", 4096)] == [0.5, 2.5]


def test_a_trace_may_have_priorities_and_choices() -> None:
    lines = ["arrival,prompt,output,choices,priority", "0,5,6,,", "1,5,6,4,-100"]
    first, second = read_trace(lines, "t.csv", 4096)
    assert (first.priority, first.choices) == (0, 1)
    assert (second.priority, second.choices) == (-100, 4)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "t.csv, line 1: no column 'arrival'"),
        (["arrival,prompt"], "t.csv, line 1: no column 'output'"),
        (["arrival,prompt,output,cancle"], "t.csv, line 1: column 'cancle' is unknown"),
        (["arrivel,prompt,output"], "t.csv, line 1: column 'arrivel' is unknown"),
        (["arrival,prompt,output,Prompt"], "t.csv, line 1: column 'prompt' is there twice"),
        (["arrival,prompt,output"], "t.csv: no requests below the header"),
        (["arrival,prompt,output", "1,2"], "t.csv, line 2: 2 cells under 3 columns"),
        (["arrival,prompt,output", "1,2,3", "x,2,3"], "t.csv, line 3, column 'arrival': 'x'"),
        (["arrival,prompt,output", "-1,2,3"], "line 2, column 'arrival': '-1' is no time"),
        (["arrival,prompt,output", "nan,2,3"], "line 2, column 'arrival': 'nan' is no time"),
        (["arrival,prompt,output", "1e300,2,3"], "column 'arrival': '1e300' is no time"),
        (["arrival,prompt,output", f"1,{'9' * 5000},3"], "column 'prompt': '9+' is no count"),
        (["arrival,prompt,output", f"1,{'9' * 200_000},3"], "t.csv, line 2: field larger"),
        (["arrival,prompt,output", "1,2.5,3"], "line 2, column 'prompt': '2.5' is no count"),
        (["arrival,prompt,output", "1,2,0"], "line 2, column 'output': '0' is no count"),
        (["arrival,prompt,output", "1,50,60"], "line 2, column 'output': 50 . 60 tokens exceed"),
        (["arrival,prompt,output,cancel", "5,2,3,4"], "line 2, column 'cancel': 4 s is before"),
        (["arrival,prompt,output,priority", "5,2,3,1.5"], "column 'priority': '1.5' is none"),
        (["arrival,prompt,output,priority", "5,2,3,-101"], "whole number from -100 to 100"),
        (["arrival,prompt,output,priority", "5,2,3,--1"], "column 'priority': '--1' is none"),
        (["arrival,prompt,output,choices", "5,2,3,0"], "column 'choices': '0' is no count"),
        (["arrival,prompt,output,choices", "5,2,3,65"], "column 'choices': 65; give 1 to 64"),
    ],
)
def test_a_trace_says_where_it_is_wrong(lines: list[str], message: str) -> None:
    with pytest.raises(FleetError, match=message):
        read_trace(lines, "t.csv", 100)


Shape = tuple[int, int, int, int]
SHAPES: list[Shape] = [
    (1, 0, 100, 0),
    *[(8, 0, context, 0) for context in range(1000, 5000, 500)],
    (32, 0, 9000, 0),
    (0, 128, 0, 0),
    *[(8, 512, 4000, 512 * before) for before in range(0, 4096, 512)],
]


def timed(shape: Shape, seconds: float) -> dict[str, float]:
    names = ("decode", "prefill", "context", "pairs")
    return {**dict(zip(names, shape, strict=True)), "seconds": seconds}


def steps(model: CostModel) -> list[dict[str, float]]:
    return [timed(shape, model.step_s(*shape)) for shape in SHAPES]


def test_calibration_finds_the_model_that_was_measured() -> None:
    truth = CostModel(
        base_s=0.004,
        decode=((1, 0.001), (8, 0.008), (32, 0.020)),
        prefill=((128, 0.01), (512, 0.03)),
        context_token_s=1e-6,
        prefill_pair_s=5e-8,
        tensor=2,
    )
    found = calibrate({"step_times": steps(truth), "cost": {"tensor": 2}})
    assert found.tensor == 2
    assert found.context_token_s == pytest.approx(1e-6)
    assert found.prefill_pair_s == pytest.approx(5e-8)
    for rows, tokens in ((1, 0), (4, 0), (20, 0), (64, 0), (0, 64), (16, 256), (8, 700)):
        assert found.step_s(rows, tokens) == pytest.approx(truth.step_s(rows, tokens))


def test_calibration_stands_up_to_noise_and_to_a_fifth_of_slow_steps() -> None:
    truth = CostModel(
        base_s=0.004,
        decode=((1, 0.001), (8, 0.008)),
        prefill=((64, 0.008), (256, 0.03)),
        context_token_s=2e-6,
        prefill_pair_s=1e-7,
    )
    random = Random(5)
    shapes: list[Shape] = [(1, 0, context, 0) for context in range(20, 2000, 20)]
    shapes += [(8, 0, context, 0) for context in range(200, 2000, 20)]
    shapes += [(0, 64, 0, 0)] * 5
    shapes += [(0, 256, 0, 256 * before) for before in range(0, 4096, 256)] * 2
    measured = []
    for shape in shapes:
        slow = 3.0 if random.random() < 0.2 else 1.0
        measured.append(timed(shape, truth.step_s(*shape) * slow * random.gauss(1.0, 0.03)))
    found = calibrate({"step_times": measured})
    assert found.context_token_s == pytest.approx(truth.context_token_s, rel=0.2)
    assert found.prefill_pair_s == pytest.approx(truth.prefill_pair_s, rel=0.2)
    for shape in ((1, 0, 1000, 0), (8, 0, 1000, 0), (0, 256, 0, 256 * 2048)):
        assert found.step_s(*shape) == pytest.approx(truth.step_s(*shape), rel=0.1)


def test_context_costs_nothing_where_it_hardly_differs() -> None:
    # 10 % more context, and steps three times as long: anything but their context.
    measured = [timed((1, 0, 100 + n, 0), 0.01 + 0.002 * n) for n in range(11)]
    measured += [timed((8, 0, 800, 0), 0.04), timed((0, 64, 0, 0), 0.05)]
    assert calibrate({"step_times": measured}).context_token_s == 0.0


@pytest.mark.parametrize("others", [[], [10, 12, 14, 16, 18, 20, 22]], ids=["alone", "far off"])
def test_one_slow_step_is_no_slope(others: list[int]) -> None:
    measured = [timed((1, 0, context, 0), 0.01) for context in [10, *others]]
    measured += [timed((1, 0, 100, 0), 5.0), timed((8, 0, 800, 0), 0.024)]
    measured += [timed((0, 64, 0, 0), 0.05), timed((0, 64, 0, 64 * 64), 5.0)]
    found = calibrate({"step_times": measured})
    assert (found.context_token_s, found.prefill_pair_s) == (0.0, 0.0)
    for shape, seconds in (((1, 0), 0.01), ((8, 0), 0.024), ((0, 64), 0.05)):
        assert found.step_s(*shape) == pytest.approx(seconds)


def test_the_base_is_of_a_curve_that_rises() -> None:
    # Two rows cannot be quicker than one: together they have the mean, and the tokens the rest.
    measured = [timed((1, 0, 9, 0), 0.02), timed((2, 0, 9, 0), 0.012), timed((0, 8, 0, 0), 0.02)]
    found = calibrate({"step_times": measured})
    assert found.base_s == pytest.approx(0.016)
    assert found.step_s(1, 0) == found.step_s(2, 0) == found.base_s
    assert found.step_s(0, 8) == pytest.approx(0.02)


def test_a_slope_that_leaves_nothing_to_a_step_is_none() -> None:
    # By the one row's slope, eight rows' contexts would take ten times what the steps did.
    measured = [timed((1, 0, 1000 * n, 0), 0.01 * n) for n in range(1, 9)]
    measured += [timed((8, 0, 80_000, 0), 0.08)] * 9
    # By the pairs of large chunks, those of small ones likewise.
    measured += [timed((0, 512, 0, 512 * 512 * n), 0.1 + 0.1 * n) for n in range(8)]
    measured += [timed((0, 1024, 0, 512 * 512 * 99), 1.0)]
    found = calibrate({"step_times": measured})
    assert (found.context_token_s, found.prefill_pair_s) == (0.0, 0.0)
    assert found.step_s(8, 0, 80_000) == pytest.approx(0.08)
    assert found.step_s(0, 1024) == pytest.approx(1.0)


def test_curves_rise_by_the_many_and_not_by_the_few() -> None:
    shapes: list[Shape] = [(1, 0, 9, 0), (4, 0, 9, 0), *[(8, 0, 9, 0)] * 9, (0, 64, 0, 0)]
    seconds = [0.01, 0.05, *[0.02] * 9, 0.03]
    measured = [timed(s, t) for s, t in zip(shapes, seconds, strict=True)]
    found = calibrate({"step_times": measured})
    assert found.step_s(8, 0) == pytest.approx(0.02, rel=0.2)
    assert found.step_s(4, 0) == pytest.approx(found.step_s(8, 0))


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        ({}, "must have a list of that name"),
        ({"step_times": [{"decode": 1}]}, r"step_times\[0\]: give decode"),
        ({"step_times": [timed((1, 0, 9, 0), 0.1)]}, "at least two numbers"),
        (
            {"step_times": [{**timed((1, 0, 9, 0), 0.1), "decode": float("inf")}]},
            r"step_times\[0\]: give decode",
        ),
        ({"step_times": [timed((1, 0, 9, 0), float("nan"))]}, r"step_times\[0\]: give decode"),
        ({"step_times": [timed((0, 1, 9, 0), 0.1)]}, r"step_times\[0\]: give decode"),
        ({"step_times": [timed((1, 0, 9, 9), 0.1)]}, r"step_times\[0\]: give decode"),
        ({"step_times": [timed((1, 0, -1, 0), 0.1)]}, r"step_times\[0\]: give decode"),
        ({"step_times": [timed((1, 0, 10**400, 0), 0.1)]}, r"step_times\[0\]: give decode"),
        (
            {
                "step_times": [
                    timed((1, 0, 9, 0), 0.1),
                    timed((8, 0, 9, 0), 0.2),
                    timed((8, 1, 9, 0), 0.1),
                ]
            },
            "with prefill tokens take no longer",
        ),
        ({"step_times": steps(CostModel()), "cost": {"blocks": float("nan")}}, "blocks is nan"),
        ({"step_times": steps(CostModel()), "cost": {"turn_s": float("inf")}}, "turn_s is inf"),
        ({"step_times": steps(CostModel()), "cost": [1]}, "must be an object"),
    ],
)
def test_calibration_says_what_to_measure(measured: dict[str, object], message: str) -> None:
    with pytest.raises(FleetError, match=message):
        calibrate(measured)


def test_a_small_run_stands_beside_what_was_measured() -> None:
    cost = CostModel()
    run = SmallRun(streams=4, prompt=100, output=50, cancel_after=20)
    figures = {f.name: f for f in beside(run, cost, {"first_token_ms": 10.0, "stopped_ms": 2.0})}
    assert set(figures) == {"first_token_ms", "stopped_ms"}
    stopped = figures["stopped_ms"]
    assert stopped.simulated == pytest.approx(1.0)
    assert stopped.error == pytest.approx(-0.5)
    assert stopped.to_json() == {
        "name": "stopped_ms",
        "measured": 2.0,
        "simulated": pytest.approx(1.0),
        "error": -0.5,
    }
