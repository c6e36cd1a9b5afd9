"""Settings of the gateway: the environment, prefix ``STOPWAY_``."""

from __future__ import annotations

import re
import secrets
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from stopway_gateway.auth import KeyRing

EXIT_CONFIG = 2  # a restart would not help: the message on stderr says what to change
_SCHEMES = {"redis_url": ("redis", "rediss"), "otlp_endpoint": ("http", "https")}
_GATEWAY_ID = re.compile(r"[a-z0-9]{1,32}")


class ConfigError(Exception):
    """A setting that cannot work; the message is one line that says what to change."""


class Settings(BaseSettings):
    """Everything that can be set. Seconds end in ``_s``, bytes in ``_bytes``."""

    model_config = SettingsConfigDict(env_prefix="STOPWAY_", env_ignore_empty=True, extra="ignore")

    bind_host: str = "0.0.0.0"
    port: int = Field(8080, ge=0, le=65535)
    gateway_id: str = Field("", validate_default=True)  # [a-z0-9]+; made up when empty
    api_keys: SecretStr = SecretStr("")  # [TENANT[:admin]=]KEY, separated by ; or ,
    secret: SecretStr = SecretStr("")  # of the service: for leaders, and to sign stops
    service_uid: str = "local"
    redis_url: str = ""  # empty: stops take the direct path only
    groups_file: str = ""
    groups_dns: str = ""  # HOST:PORT, resolved each second
    model_name: str = "smollm2-135m-instruct"
    otlp_endpoint: str = ""
    spans_dir: str = ""
    trust_traceparent: bool = False
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "info"

    # What a client may send.
    body_bytes_max: int = Field(4 * 1024 * 1024, gt=0)
    body_timeout_s: float = Field(30.0, gt=0)
    choices_max: int = Field(16, ge=1)
    stop_strings_max: int = Field(16, ge=0)
    stop_string_chars_max: int = Field(256, ge=1)
    grammar_bytes_max: int = Field(64 * 1024, gt=0, le=64 * 1024)  # groups take no more
    stop_request_ids_max: int = Field(1000, ge=1, le=10_000)
    metadata_keys_max: int = Field(16, ge=0)
    metadata_chars_max: int = Field(512, ge=1)
    requests_max: int = Field(4096, ge=1)  # live at once
    wait_s_max: float = Field(60.0, gt=0)  # of a stop's, or a mode's, timeout

    # What a client may take.
    keepalive_s: float = Field(15.0, gt=0)
    slow_reader_s: float = Field(30.0, gt=0)  # one send may block this long
    slow_reader_bytes_max: int = Field(4 * 1024 * 1024, gt=0)  # text that waits for it
    tcp_user_timeout_s: float = Field(30.0, ge=1)  # a silent client is gone after about this

    # The stop path.
    dispatch_wait_s: float = Field(10.0, ge=0)  # for a ready group
    stream_open_s: float = Field(5.0, gt=0)  # headers go out by then, accepted or not
    cut_wait_s: float = Field(0.5, ge=0)  # for the leader's outcome after a stop
    resend_after_s: float = Field(0.2, gt=0)  # a stop whose turn is not known
    resend_max_s: float = Field(5.0, gt=0)
    unknown_wait_s: float = Field(1.0, gt=0)  # for everybody to say that a uid is unknown
    epoch_grace_s: float = Field(2.0, gt=0)  # for a leader to end the requests of an old epoch
    stop_stream_age_s: float = Field(900.0, gt=60)
    keep_s: float = Field(600.0, gt=0)  # finished requests and stops stay readable
    keep_max: int = Field(20_000, ge=1)
    groups_poll_s: float = Field(1.0, gt=0)
    drain_s: float = Field(30.0, ge=0)
    flush_s: float = Field(2.0, ge=0)  # telemetry, at the end

    @field_validator("gateway_id")
    @classmethod
    def _check_gateway_id(cls, value: str) -> str:
        value = value or secrets.token_hex(4)
        if not _GATEWAY_ID.fullmatch(value):
            raise ValueError("1 to 32 of a-z and 0-9, for it is a part of every id")
        return value

    @field_validator("api_keys")
    @classmethod
    def _check_api_keys(cls, value: SecretStr) -> SecretStr:
        KeyRing(value.get_secret_value())
        return value

    @field_validator(*_SCHEMES)
    @classmethod
    def _check_url(cls, value: str, info: ValidationInfo) -> str:
        schemes = _SCHEMES[info.field_name or ""]
        try:
            parts = urlsplit(value)
            fits = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
        except ValueError:
            fits = False
        if value and not fits:
            raise ValueError(f"a URL as {schemes[0]}://HOST:PORT")
        return value

    @field_validator("groups_dns")
    @classmethod
    def _check_groups_dns(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if value and not (host and port.isdecimal() and 0 < int(port[:6]) <= 65535):
            raise ValueError("HOST:PORT")
        return value

    @field_validator("log_level", mode="before")
    @classmethod
    def _lower_log_level(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value


def load_settings() -> Settings:
    """The settings in the environment. Raises ``ConfigError`` for one that cannot work."""
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = "_".join(str(part) for part in first["loc"]).upper()
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"STOPWAY_{name}: {message}") from None
