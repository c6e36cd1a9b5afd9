"""Settings that cannot work: exit code 2, and one line that says what to change."""

from __future__ import annotations

import re
import socket

import pytest

from stopway_gateway.__main__ import main
from stopway_gateway.config import EXIT_CONFIG, Settings

KEY = "do-not-print-this"


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("PORT", "70000", "less than or equal to 65535"),
        ("PORT", "http", "a valid integer"),
        ("GATEWAY_ID", "Gateway-1", "1 to 32 of a-z and 0-9"),
        ("GATEWAY_ID", "a" * 33, "1 to 32 of a-z and 0-9"),
        ("GATEWAY_ID", "a\n", "1 to 32 of a-z and 0-9"),
        ("API_KEYS", f"a b={KEY}", "[TENANT[:admin]=]KEY"),
        ("REDIS_URL", f"http://:{KEY}@host:1", "redis://HOST:PORT"),
        ("REDIS_URL", f"redis://:{KEY}@host:x", "redis://HOST:PORT"),
        ("OTLP_ENDPOINT", "host:4318", "http://HOST:PORT"),
        ("GROUPS_DNS", "leaders", "HOST:PORT"),
        ("LOG_LEVEL", "loud", "'debug', 'info'"),
        ("DRAIN_S", "-1", "greater than or equal to 0"),
    ],
)
def test_bad_setting(
    name: str,
    value: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(f"STOPWAY_{name}", value)
    line = _refused(capsys)
    assert line.startswith(f"STOPWAY_{name}: ") and told in line and KEY not in line


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1", "no such host"])
def test_address_that_cannot_be_had(
    host: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A port in use; an address of another machine; none at all."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("STOPWAY_BIND_HOST", host)
        monkeypatch.setenv("STOPWAY_PORT", str(port))
        line = _refused(capsys)
    assert host in line and str(port) in line and "STOPWAY_PORT" in line


def _refused(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that the process ends with."""
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == EXIT_CONFIG == 2
    printed = capsys.readouterr()
    assert not printed.out and printed.err.count("\n") == 1
    return printed.err


def test_good_settings() -> None:
    made = Settings(log_level="WARNING", redis_url="rediss://u:p@host:1/0", groups_dns="a.b:80")
    assert made.log_level == "warning"
    ids = {Settings().gateway_id for _ in range(2)}
    assert len(ids) == 2 and all(re.fullmatch("[0-9a-f]{8}", one) for one in ids)
