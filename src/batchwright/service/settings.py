"""Settings of the service: the model that defines flags, environment variables, the TOML file and docs/settings.md.

A flag takes precedence over the environment, the environment over the file, and the file over the default.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin
from urllib.parse import urlsplit

from platformdirs import user_data_path
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    SecretStr,
    ValidationInfo,
    create_model,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from pydantic_settings import PydanticBaseSettingsSource as Source

from batchwright.engine_config import EngineConfig, engine_options
from batchwright.errors import InputError
from batchwright.inference.endpoint_address import endpoint_url
from batchwright.inference.replicas.cores import parse_count
from batchwright.inference.replicas.ray_resources import RayResources
from batchwright.limiting.quotas import NAMES as QUOTAS
from batchwright.limiting.quotas import Quotas
from batchwright.models import BUILTIN, DEFAULT_MODEL, Kind
from batchwright.policies.suspects import MAX_CRASHES
from batchwright.service.limits import ServiceLimits
from batchwright.service.observability.slo_classes import SloClass, read_slo_classes
from batchwright.wire.bounds import MAX_PROMPTS
from batchwright.wire.dialects import dialect_for
from batchwright.wire.requests import RESPONSES_URL

ENV_PREFIX = "BATCHWRIGHT_"
DEFAULT_EMBEDDING_MODEL = next(name for name, model in BUILTIN.items() if model.kind is Kind.EMBED)

_GROUPS = (
    "Address", "Connections", "Model", "Engine", "Two classes of traffic", "Storage", "Limits", "Quotas", "Webhooks",
    "Operation",
)  # fmt: skip
"""Groups of settings, in the order of the help and of the page."""

LogFormat = Literal["auto", "console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


def _no_blank(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    return value


def _split(value: object) -> object:
    """Split a list that is given as text, by the environment or a flag, at commas."""
    return [each.strip() for each in value.split(",") if each.strip()] if isinstance(value, str) else value


def _are_origins(values: tuple[str, ...]) -> tuple[str, ...]:
    """Check that values are origins as browsers send them in `Origin`, without a path or a default port."""
    for value in values:
        parts = urlsplit(value)
        if value != "*" and (parts.scheme not in ("http", "https") or value != f"{parts.scheme}://{parts.netloc}"):
            raise ValueError(f"{value!r} is no origin: write scheme and host, such as https://chat.example.com")
    return tuple(value.lower() for value in values)


def _are_aliases(values: tuple[str, ...]) -> tuple[str, ...]:
    names = [value.partition("=")[0].strip() for value in values]
    for value, name in zip(values, names, strict=True):
        if not name or not value.partition("=")[2].strip():
            raise ValueError(f"{value!r} is no alias: write NAME=MODEL")
        if names.count(name) > 1:
            raise ValueError(f"the alias {name!r} is given twice")
    return values


def _resources(given: Any) -> RayResources:
    try:
        return RayResources.of(given)
    except InputError as error:
        raise ValueError(str(error)) from None


Replicas = Annotated[int | Literal["auto"], BeforeValidator(parse_count)]
Resources = Annotated[RayResources, NoDecode, BeforeValidator(_resources)]
SloClasses = Annotated[Mapping[str, SloClass], NoDecode, BeforeValidator(read_slo_classes)]
Text = Annotated[str, AfterValidator(_no_blank)]
Location = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]
Seconds = Annotated[float, Field(ge=0.0, le=86_400.0)]
Wait = Annotated[float, Field(gt=0.0, le=86_400.0)]
Count = Annotated[int, Field(ge=1)]
Size = Annotated[ByteSize, Field(ge=1)]
SizeOrNone = Annotated[ByteSize, Field(ge=0)]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Origins = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split), AfterValidator(_are_origins)]
Aliases = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split), AfterValidator(_are_aliases)]


def _setting(group: str, default: Any, description: str, *, flag: bool = True, **more: Any) -> Any:
    """Return a field of `group`. Without `flag`, it is never a flag, which all users of a machine can read."""
    return Field(default, description=description, json_schema_extra={"group": group, "flag": flag}, **more)


def default_data() -> Path:
    """Return the data folder of this program for this user, which depends on the platform."""
    return user_data_path("batchwright", appauthor=False)


def _engine_fields() -> dict[str, Any]:
    """Return a field for each engine option."""
    return {
        option.name: (
            Size | None if option.name == "kv_memory" else option.annotation,
            _setting(option.group, option.default, option.help),
        )
        for option in engine_options()
    }


if TYPE_CHECKING:
    _EngineSettings = BaseSettings
else:
    _EngineSettings = create_model("_EngineSettings", __base__=BaseSettings, **_engine_fields())


class Settings(_EngineSettings):
    """Settings of `batchwright serve`. Made by `load_settings` from all sources, or directly in tests."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", frozen=True, validate_default=False, hide_input_in_errors=True
    )

    host: Text = _setting(
        "Address",
        "127.0.0.1",
        "Address to listen on. An address that is not loopback requires an API key in the store: batchwright keys"
        " create",
    )
    port: int = _setting("Address", 8000, "Port to listen on; 0: any that is free.", ge=0, le=65_535)
    cors_origins: Origins = _setting(
        "Address",
        (),
        "Origins of web pages that may use the service from a browser, separated by commas: "
        "https://chat.example.com. An asterisk allows all origins, but only if requests need a key.",
    )

    tls_cert: Location | None = _setting(
        "Address",
        None,
        "PEM file with the certificate and its chain, to serve https. Read again on SIGHUP. Default: plain HTTP.",
    )
    tls_key: Location | None = _setting("Address", None, "PEM file with the key of tls_cert, without a password.")

    max_connections: Count | None = _setting(
        "Connections",
        None,
        "Most connections at once. Beyond that, the oldest connection without a request is closed; if all have "
        "one, new connections are answered with 503. Default: three quarters of the file descriptors (ulimit -n) "
        "that are not reserved.",
    )
    max_connections_per_address: Count | None = _setting(
        "Connections",
        None,
        "Most connections from one address (for IPv6, from one /64 network). Default: a quarter of "
        "max_connections, but no limit for this machine, where a proxy may run.",
    )
    header_timeout: Wait = _setting(
        "Connections", 15.0, "Seconds in which the whole head of a request, or a TLS handshake, has to arrive."
    )
    idle_timeout: Wait = _setting(
        "Connections", 75.0, "Seconds for which a connection is kept open between two requests."
    )
    write_timeout: Wait = _setting(
        "Connections",
        60.0,
        "Seconds for which a client may read nothing of an answer; then its connection is closed and its request "
        "cancelled.",
    )
    min_upload_rate: Size = _setting(
        "Connections",
        ByteSize(1000),
        "Least average rate of a body that takes longer than upload_timeout, in bytes per second.",
    )
    max_page_streams: Count = _setting(
        "Connections",
        256,
        "Most open dashboards that are updated, a quarter of them for one tenant; others get 429 or 503.",
    )

    model: Text = _setting(
        "Model", DEFAULT_MODEL, "Model that generates: a built-in name, a local folder, a GGUF file or a hub id."
    )
    embedding_model: str = _setting(
        "Model",
        DEFAULT_EMBEDDING_MODEL,
        "Model for /v1/embeddings, and for /v1/rerank and /v1/score without a cross-encoder, named in the same way; an "
        "empty text: none.",
    )
    classifier: Names = _setting(
        "Model",
        (),
        "Models for /v1/rerank and /v1/score, which are cross-encoders, and for /classify: folders or hub ids, "
        "separated by commas, or in further flags. A request that names none gets the first that can.",
    )
    replicas: Replicas | None = _setting(
        "Model",
        None,
        "Number of processes that compute, each with the whole models on a GPU or a group of cores of its own; auto: "
        "one for each GPU, else for each NUMA node. One that dies is started again, and its requests are given to "
        "others. Default: the process of the service computes.",
    )
    ray: Text | None = _setting(
        "Model",
        None,
        "Ray cluster on whose nodes the replicas compute, by default one: auto for that of this machine, local to "
        "start one here, host:port or ray://host:port. Default: replicas compute on this machine.",
    )
    resources: Resources | None = _setting(
        "Model",
        None,
        "What each replica takes of a node of the Ray cluster, as JSON: num_cpus, num_gpus, memory, accelerator_type, "
        'resources; such as {"num_gpus": 1}. Default: one CPU.',
    )
    backend: Text = _setting(
        "Model",
        "engine",
        'What computes: "engine", or the address of an endpoint elsewhere, such as http://10.0.0.5:8000/v1. The '
        "service waits for an endpoint that does not answer yet.",
    )
    model_alias: Aliases = _setting(
        "Model",
        (),
        "Further names of models, separated by commas: gpt-4o-mini=smollm2. Answers carry the name in the request.",
    )
    backend_dialect: Literal["openai", "anthropic"] | None = _setting(
        "Model", None, "What the endpoint speaks. Default: anthropic for api.anthropic.com, otherwise openai."
    )
    backend_api_key: SecretStr | None = _setting(
        "Model",
        None,
        "API key for the endpoint. Default: the key in the provider's own variable, such as OPENAI_API_KEY or "
        "ANTHROPIC_API_KEY.",
        flag=False,
    )
    backend_api_key_env: Text | None = _setting(
        "Model", None, "Environment variable with the API key for the endpoint."
    )
    backend_api_key_file: Location | None = _setting(
        "Model", None, "File whose first line is the API key for the endpoint."
    )
    backend_concurrency: Count = _setting(
        "Model", 256, "Most requests under way at the endpoint. Up to that, as many as deliver the most are found."
    )
    backend_rpm: Count | None = _setting("Model", None, "The endpoint's limit of requests a minute, if it states none.")
    backend_tpm: Count | None = _setting("Model", None, "The endpoint's limit of tokens a minute, if it states none.")

    max_online_sequences: Annotated[int, Field(ge=2)] = _setting(
        "Two classes of traffic",
        4096,
        "Most completions and embeddings of online requests, waiting or being computed. One key may hold as many "
        "as are left free, times its weight; further requests are answered with 429 and Retry-After.",
    )
    max_online_tokens: Annotated[int, Field(ge=2)] = _setting(
        "Two classes of traffic",
        16_777_216,
        "Most prompt tokens of online requests, estimated; a prompt with n completions counts n times. Keys share"
        " them in the same way.",
    )
    batch_concurrency: Count | None = _setting(
        "Two classes of traffic", None, "Most batch lines under way at once. Default: as many as keep the batches full."
    )

    slo: SloClasses = _setting(
        "Two classes of traffic",
        {},
        "Service level objectives of classes of online requests, whose attainment is reported: tables such as "
        "[slo.interactive] with ttft_ms, tpot_ms, latency_ms, goal, max_priority and keys; elsewhere as text: "
        "interactive: ttft_ms=500 max_priority=2; bulk: latency_ms=60000 keys=nightly",
    )

    data: Location = _setting(
        "Storage",
        None,
        "Folder for files and the SQLite database. Default: the platform's data folder of this user.",
        validate_default=True,
    )
    database: Text | None = _setting(
        "Storage",
        None,
        "A SQLite file, or postgresql://user@host/name to share one store between machines. Default: "
        "batchwright.db in the data folder.",
    )

    min_free_disk: SizeOrNone = _setting(
        "Storage",
        ByteSize(256 * 2**20),
        "Free bytes that the disk of the data folder must keep, such as 1GiB; with less, uploads and new batches "
        "are refused with 503, and running batches continue. 0: no minimum.",
    )

    max_lines: Count = _setting("Limits", 50_000, "Most lines in an input file.")
    max_file_size: Size = _setting("Limits", ByteSize(200_000_000), "Most bytes in an uploaded file, such as 200MB.")
    max_line_size: Size = _setting("Limits", ByteSize(2**20), "Most bytes in a line of an input file, such as 1MiB.")
    max_online_body_size: Size = _setting(
        "Limits",
        ByteSize(4 * 2**20),
        "Most bytes in the body of a chat, a completion or a request for embeddings, such as 4MiB.",
    )
    max_body_size: Size = _setting(
        "Limits", ByteSize(16 * 2**20), "Most bytes in the body of a request to /v1/batch/*, such as 16MiB."
    )
    max_body_memory: Size = _setting(
        "Limits",
        ByteSize(64 * 2**20),
        "Most bytes of request bodies over 64 KiB in process at once; further requests are answered with 429 and "
        "Retry-After.",
        validate_default=True,
    )
    upload_timeout: Wait = _setting(
        "Limits", 60.0, "Seconds without data after which an upload or another body is given up."
    )
    max_prompts: Annotated[int, Field(ge=1, le=MAX_PROMPTS)] = _setting(
        "Limits", 1000, "Most prompts in a request to /v1/batch/sync and /v1/batch/async."
    )

    quota_storage: Size | None = _setting(
        "Quotas", None, "Most bytes in the files of a tenant, such as 10GB. Default for all quotas: no limit."
    )
    quota_enqueued_lines: Count | None = _setting(
        "Quotas", None, "Most lines without a result in the batches of a tenant."
    )
    quota_enqueued_tokens: Count | None = _setting(
        "Quotas", None, "Most prompt tokens of those lines; four bytes of input count as a token."
    )
    quota_requests_per_minute: Count | None = _setting("Quotas", None, "Most online requests of a tenant per minute.")
    quota_tokens_per_minute: Count | None = _setting(
        "Quotas", None, "Most tokens per minute in the prompts and answers of a tenant's online requests."
    )
    quota_concurrent_requests: Count | None = _setting("Quotas", None, "Most online requests of a tenant at once.")

    webhook_allow: Names = _setting(
        "Webhooks",
        (),
        "Hosts and networks to which webhooks may be sent although they are not public, separated by commas: "
        "hooks.internal, 10.1.0.0/16",
    )

    line_timeout: Annotated[float, Field(gt=0.0, le=604_800.0)] = _setting(
        "Operation",
        3600.0,
        "Seconds in which a line of a batch has to be computed; otherwise it fails with request_timeout.",
    )
    max_crashes: Annotated[int, Field(ge=2, le=1_000_000)] = _setting(
        "Operation",
        MAX_CRASHES,
        "Number of process deaths after which the line being computed fails with crashed; the last try is made alone.",
    )
    lease: Annotated[float, Field(ge=1.0, le=3600.0)] = _setting(
        "Operation",
        15.0,
        "Seconds without a sign of life after which the lines of a process go to others with the same store.",
    )
    drain_grace: Seconds = _setting(
        "Operation", 30.0, "Seconds that online requests have to finish after SIGTERM or Ctrl-C."
    )
    audit_retention: Annotated[int, Field(ge=0, le=36_500)] = _setting(
        "Operation", 90, "Days for which the audit log (audit/ in the data folder) is kept; 0: nothing is logged."
    )
    trace_log: Location | None = _setting(
        "Operation",
        None,
        "File to which a line is added for each answer: its time and its numbers of tokens, no text. batchwright "
        "simulate reads it. Default: none.",
    )
    log_format: LogFormat = _setting(
        "Operation", "auto", "json, console, or auto: console on a terminal and json elsewhere."
    )
    log_level: LogLevel = _setting("Operation", "info", "debug, info, warning or error.")

    @property
    def engine(self) -> EngineConfig:
        """Options of the engine."""
        return EngineConfig().with_options(**{option.name: getattr(self, option.name) for option in engine_options()})

    @field_validator(*(option.name for option in engine_options()))
    @classmethod
    def _engine_option(cls, value: object, info: ValidationInfo) -> object:
        try:
            EngineConfig().with_options(**{str(info.field_name): value})
        except ValueError as error:
            raise ValueError(str(error).partition(": ")[2]) from None
        return value

    @property
    def aliases(self) -> dict[str, str]:
        """Models by their further names, from `model_alias`."""
        pairs = [value.partition("=") for value in self.model_alias]
        return {name.strip(): model.strip() for name, _, model in pairs}

    @field_validator("data", mode="before")
    @classmethod
    def _data_folder(cls, value: object) -> object:
        if value == "":
            raise ValueError("names no folder: leave it out for the default, or give . for the current one")
        return default_data() if value is None else value

    @field_validator("max_body_memory")
    @classmethod
    def _holds_a_body(cls, value: ByteSize, others: ValidationInfo) -> ByteSize:
        for name in ("max_body_size", "max_online_body_size"):
            if value < others.data.get(name, 0):
                raise ValueError(f"must be at least {name}, {others.data[name]}, or such a body would never be taken")
        return value

    @field_validator("backend")
    @classmethod
    def _engine_or_address(cls, value: str) -> str:
        if value != "engine":
            try:
                endpoint_url(value, key="backend_api_key")
            except ValueError as error:
                raise ValueError(f'{error}; or "engine"') from None
        return value

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: Source, *others: Source, **named: Source
    ) -> tuple[Source, ...]:
        """Use only the arguments: `load_settings` reads the sources, so that tests do not depend on the environment."""
        return (init_settings,)


def limits_of(settings: Settings) -> ServiceLimits:
    """Return the limits of the job service by these settings."""
    return ServiceLimits(
        max_lines=settings.max_lines,
        max_file_bytes=settings.max_file_size,
        max_line_bytes=settings.max_line_size,
        max_prompts=settings.max_prompts,
        min_free_disk=settings.min_free_disk,
        responses=settings.backend == "engine"
        or RESPONSES_URL in dialect_for(settings.backend_dialect, settings.backend).endpoints,
        default_quotas=Quotas(**{name: getattr(settings, f"quota_{name.removesuffix('_bytes')}") for name in QUOTAS}),
    )


def setting_fields() -> dict[str, FieldInfo]:
    """Return all settings by name, in the order of their groups."""
    return dict(sorted(Settings.model_fields.items(), key=lambda item: _GROUPS.index(group_of(item[1]))))


def group_of(field: FieldInfo) -> str:
    """Return the group of a setting, which is its heading in the help and on the page of settings."""
    extra = field.json_schema_extra
    return str(extra["group"]) if isinstance(extra, dict) else ""


def has_flag(field: FieldInfo) -> bool:
    """Return whether a setting may be given as a flag."""
    extra = field.json_schema_extra
    return bool(extra["flag"]) if isinstance(extra, dict) else True


def type_name(field: FieldInfo) -> str:
    """Return the kind of a setting's value in one word: "text", "number", "size", ..."""
    kind = field.annotation
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    first = next(each for each in kinds if each is not type(None))
    while get_origin(first) is Annotated:
        first = get_args(first)[0]
    if get_origin(first) is Literal:
        return "|".join(map(str, get_args(first)))
    if get_origin(first) is tuple:
        return "list"
    if get_origin(first) is Mapping:
        return "tables"
    names = {bool: "true|false", int: "number", float: "number", ByteSize: "size", Path: "path", SecretStr: "secret"}
    return names.get(first, "text") if isinstance(first, type) else "text"


def shown_default(field: FieldInfo) -> str:
    """Return the default as a user would write it; empty if there is none, or the description states it."""
    value = field.default
    if value is None or value in ("", (), {}):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, ByteSize):
        return value.human_readable(decimal=value % 1000 == 0).replace(".0", "")
    return f"{value:g}" if isinstance(value, float) else str(value)


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is certainly this machine; the only trusted name is localhost."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
