"""What the fleet reads: cost models, traces, measurements; and what it says of bad ones."""

from __future__ import annotations

import json

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


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "t.csv, line 1: no column 'arrival'"),
        (["arrival,prompt"], "t.csv, line 1: no column 'output'"),
        (["arrival,prompt,output,x"], "t.csv, line 1: column 'x'"),
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
    ],
)
def test_a_trace_says_where_it_is_wrong(lines: list[str], message: str) -> None:
    with pytest.raises(FleetError, match=message):
        read_trace(lines, "t.csv", 100)


def steps(model: CostModel) -> list[dict[str, float]]:
    shapes = [(1, 0), (8, 0), (8, 0), (32, 0), (0, 128), (8, 512), (0, 512)]
    return [{"decode": d, "prefill": p, "seconds": model.step_s(d, p)} for d, p in shapes]


def test_calibration_finds_the_model_that_was_measured() -> None:
    truth = CostModel(
        base_s=0.004,
        decode=((1, 0.001), (8, 0.008), (32, 0.020)),
        prefill=((128, 0.01), (512, 0.03)),
        tensor=2,
    )
    found = calibrate({"step_times": steps(truth), "cost": {"tensor": 2}})
    assert found.tensor == 2
    for rows, tokens in ((1, 0), (4, 0), (20, 0), (64, 0), (0, 64), (16, 256), (8, 700)):
        assert found.step_s(rows, tokens) == pytest.approx(truth.step_s(rows, tokens))


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        ({}, "must have a list of that name"),
        ({"step_times": [{"decode": 1}]}, r"step_times\[0\]: give decode"),
        ({"step_times": [{"decode": 1, "prefill": 0, "seconds": 0.1}]}, "at least two numbers"),
        (
            {"step_times": [{"decode": float("inf"), "prefill": 0, "seconds": 0.1}]},
            r"step_times\[0\]: give decode",
        ),
        (
            {"step_times": [{"decode": 1, "prefill": 0, "seconds": float("nan")}]},
            r"step_times\[0\]: give decode",
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
