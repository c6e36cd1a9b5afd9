"""The OpenAPI document: all of the API, and nothing that is not so."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from pydantic import BaseModel
from starlette.routing import Route

from stopway_gateway import answers
from stopway_gateway.app import App, create_app
from stopway_gateway.config import Settings
from stopway_gateway.schemas import ChatBody, CompletionBody

from .conftest import ACME, Make, Stack, chat, completion
from .leader import Leader, Plan

OPEN = {"/healthz", "/readyz", "/metrics"}


@pytest.fixture
def app() -> App:
    return create_app(Settings())


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


def test_lists_every_route_and_describes_all_of_it(app: App) -> None:
    listed = {(path, method.upper()) for path, method, _ in operations(app.openapi())}
    served = set()
    for route in app.routes:
        assert isinstance(route, Route) and route.methods
        served |= {(route.path_format, method) for method in route.methods}
    assert listed == served and ("/v1/chat/completions", "POST") in served

    for path, method, operation in operations(app.openapi()):
        where = f"{method} {path}"
        assert operation["description"].strip(), where
        for parameter in operation.get("parameters", []):
            assert parameter["description"].strip() and parameter["schema"], where
        for status, response in operation["responses"].items():
            assert response["description"].strip(), (where, status)
            assert status != "422", where  # ours are 400
        assert (operation.get("security") == []) == (path in OPEN), where
    ids = [operation["operationId"] for *_, operation in operations(app.openapi())]
    assert len(set(ids)) == len(ids)


def test_references_lead_somewhere_and_bodies_have_all_fields(app: App) -> None:
    document = app.openapi()
    schemas = document["components"]["schemas"]

    def check(value: Any) -> None:
        if isinstance(value, dict):
            reference = value.get("$ref")
            if isinstance(reference, str):
                assert reference.rsplit("/", 1)[0] == "#/components/schemas"
                assert reference.rsplit("/", 1)[1] in schemas, reference
            for child in value.values():
                check(child)
        elif isinstance(value, list):
            for child in value:
                check(child)

    check(document)
    for path, model in (("/v1/chat/completions", ChatBody), ("/v1/completions", CompletionBody)):
        operation = document["paths"][path]["post"]
        content = operation["requestBody"]["content"]["application/json"]
        assert content["schema"] == {"$ref": f"#/components/schemas/{model.__name__}"}
        assert set(schemas[model.__name__]["properties"]) == set(model.model_fields)
        assert set(operation["responses"]["200"]["content"]) == {
            "application/json",
            "text/event-stream",
        }


async def test_pages_need_a_key(stack: Stack) -> None:
    document = (await stack.client.get("/openapi.json", headers=ACME)).json()
    assert document["openapi"].startswith("3.1") and document["info"]["title"] == "Stopway"
    page = await stack.client.get("/docs", headers=ACME)
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "/v1/stops/{stop_id}" in page.text
    async with httpx.AsyncClient(base_url=stack.url, trust_env=False) as nobody:
        for path in ("/openapi.json", "/docs", "/redoc", "/docs/oauth2-redirect"):
            reply = await nobody.get(path)
            assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
    assert (await stack.client.get("/redoc")).status_code == 404


async def test_answers_are_as_documented(make: Make, leader: Leader) -> None:
    """The shapes forbid what they do not have, so no answer has more, or less, than they say."""
    stack = await make([leader], resend_after_s=0.05)

    async def held(shape: type[BaseModel], path: str, status: int = 200, **send: Any) -> Any:
        method = "POST" if send else "GET"
        reply = await stack.client.request(method, path, **send)
        assert reply.status_code == status, reply.text
        shape.model_validate(reply.json())
        return reply.json()

    await held(answers.HealthAnswer, "/healthz")
    await held(answers.ReadyAnswer, "/readyz")
    models = await held(answers.ModelList, "/v1/models")
    await held(answers.ModelAnswer, f"/v1/models/{models['data'][0]['id']}")
    await held(answers.ErrorAnswer, "/v1/models/none", 404)
    leader.plan = Plan(logprobs=True, drafted=2, accepted=1)
    body = chat(logprobs=True, n=2)
    await held(answers.ChatAnswer, "/v1/chat/completions", json=body)
    leader.plan = Plan(chunks=None, pace_s=0.005)
    task = asyncio.create_task(held(answers.CompletionAnswer, "/v1/completions", json=completion()))
    await leader.wait_for(lambda: leader.running)
    (uid,) = leader.running
    await held(answers.RequestAnswer, f"/v1/requests/{uid}")
    query = "wait=reclaimed&timeout=5"
    stop = await held(answers.StopAnswer, f"/v1/requests/{uid}/cancel?{query}", json=None)
    await held(answers.StopAnswer, f"/v1/stops/{stop['stop_id']}")
    await held(answers.StopAnswer, "/v1/stops", json={"all": True})
    await task
    await held(answers.RequestList, "/v1/requests")
    await held(answers.GroupList, "/v1/groups")
    await held(answers.ModeAnswer, "/v1/groups/pause", json={"mode": "keep"})
    leader.answer_modes = False
    await held(answers.ModeAnswer, "/v1/groups/resume", 202, json={"timeout": 0})
    await held(answers.LedgerAnswer, "/debug/ledger")
    await held(answers.TraceAnswer, f"/debug/trace?trace_id={stop['trace_id']}")


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/v1/requests?limit=0", "limit"),
        ("/v1/requests?limit=" + "1" * 5000, "limit"),
        ("/v1/requests?limit=1e400", "limit"),
        ("/debug/trace", "trace_id"),
        ("/debug/trace?trace_id=" + "A" * 32, "trace_id"),
    ],
)
async def test_bad_parameters_are_our_400(stack: Stack, path: str, param: str) -> None:
    reply = await stack.client.get(path)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, param, "invalid_value")
    assert error["message"].startswith(f"{param}: ") and len(reply.content) < 1000


@pytest.mark.parametrize("query", ["wait=noticed", "timeout=nan", "timeout=-1", "timeout=61"])
async def test_bad_waits_are_our_400(stack: Stack, query: str) -> None:
    reply = await stack.client.post(f"/v1/requests/req-1-other-2/cancel?{query}")
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == query.split("=")[0]


async def test_a_failure_of_ours_is_one_error_object(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("a secret of ours")

    monkeypatch.setattr(stack.gateway.table, "visible", fail)
    reply = await stack.client.get("/v1/requests")
    assert reply.status_code == 500 and "secret" not in reply.text
    assert reply.json()["error"]["code"] == "internal_error"
    monkeypatch.setattr(stack.gateway, "open", fail)
    reply = await stack.client.post("/v1/completions", json=completion(stream=True))
    assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")
    await stack.quiet()
