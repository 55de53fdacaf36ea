"""Flags of commands that are generated: those of the engine's options, of the service's settings and of its store."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from batchwright.engine_config import EngineConfig, EngineOption, engine_options
from batchwright.errors import InputError
from batchwright.inference.endpoint_keys import KEY_FLAG_REFUSED
from batchwright.wire.fields import MAX_TEMPERATURE


def with_flags(
    command: Callable[..., None],
    parameter: str,
    flags: Sequence[inspect.Parameter],
    value_of: Callable[[dict[str, Any]], object],
) -> Callable[..., None]:
    """Return `command` with `flags` in place of `parameter`, which is given `value_of` the flags' values by name."""
    hints = get_type_hints(command, include_extras=True)
    kept = [
        each.replace(annotation=hints[each.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for each in inspect.signature(command).parameters.values()
        if each.name != parameter
    ]

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        value = value_of({flag.name: given.pop(flag.name) for flag in flags})
        command(**given, **{parameter: value})

    del wrapped.__wrapped__
    set_parameters(wrapped, [*kept, *flags])
    return wrapped


def set_parameters(command: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> None:
    """Make `parameters` the signature that Typer sees."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters} | {"return": None}


def refuse_key_flag(arguments: Sequence[str], *, prefix: str = "") -> None:
    """Raise `InputError` if `arguments` have a key as the value of a flag; `prefix`: of the flags to use instead."""
    for argument in arguments:
        if argument == "--":
            return
        if argument.partition("=")[0] == "--backend-api-key":
            raise InputError(KEY_FLAG_REFUSED.format(prefix=prefix))


_SAMPLING: dict[str, tuple[Any, str, str]] = {
    "max_tokens": (
        int,
        "Most tokens to generate for a prompt.",
        "256; with --backend, as for all of these, the endpoint's own",
    ),
    "min_tokens": (int, "Least number of tokens before a stop text or the end of the text counts.", "0"),
    "temperature": (float, "Randomness in the choice of tokens; 0 is none (greedy).", "0.7"),
    "top_p": (float, "Choose from the smallest set of tokens whose probability reaches this.", "1.0"),
    "top_k": (int, "Number of likeliest tokens to choose from; 0 is all.", "0"),
    "min_p": (float, "Least probability of a token as a fraction of the likeliest one's.", "0.0"),
    "repetition_penalty": (
        float,
        "Above 1, tokens that occurred already, also in the prompt, become less likely.",
        "1.0",
    ),
    "presence_penalty": (float, "Above 0, tokens that were generated already become less likely.", "0.0"),
    "frequency_penalty": (float, "The same, for each time that they were generated.", "0.0"),
    "stop": (list[str], "A text that ends the answer, and is not part of it; may be repeated.", ""),
    "stop_token_ids": (list[int], "A token that ends the answer; may be repeated.", ""),
    "n": (int, "Number of answers to each prompt.", "1"),
    "logprobs": (int, "Log-probabilities of the tokens, and of this many alternatives to each.", ""),
    "ignore_eos": (bool, "Whether to go on after the end of the text.", "false"),
    "choices": (str, "Texts, separated by commas, one of which is the answer.", ""),
    "regex": (str, "Regular expression that the whole answer matches.", ""),
    "json_schema": (Path, "File with the JSON Schema that the answer satisfies.", ""),
    "seed": (int, "Same seed, same tokens, on one machine and dtype.", ""),
}


_METAVARS = {"choices": "A,B,...", "regex": "PATTERN", "json_schema": "FILE"}
_BOUNDS: dict[str, dict[str, float]] = {"temperature": {"min": 0.0, "max": MAX_TEMPERATURE}}
"""Ranges of flags if they are those of lines, and not of `SamplingParams`."""


def with_sampling_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with flags for sampling in place of its parameter `sampling`, a dict of those that are given."""
    # With an endpoint, what is left out has the endpoint's own default.
    return with_flags(command, "sampling", _sampling_flags("Sampling, where lines do not say"), _sampling_of)


def with_job_sampling_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command`, which has a `--seed` of its own and no endpoints, with the same flags for the lines of a job.

    The job's seed is `--job-seed`.
    """
    flags = _sampling_flags("Sampling of the job, where its lines do not say", seed="job_seed", has_endpoints=False)

    def sampling_of(given: dict[str, Any]) -> dict[str, Any]:
        return _sampling_of({"seed" if name == "job_seed" else name: value for name, value in given.items()})

    return with_flags(command, "sampling", flags, sampling_of)


def _sampling_flags(group: str, *, seed: str = "seed", has_endpoints: bool = True) -> list[inspect.Parameter]:
    """Return the flags for sampling. `seed`: the name of that of the seed."""
    return [
        flag(
            seed if name == "seed" else name,
            kind,
            text,
            group,
            default if has_endpoints else default.partition("; with --backend")[0],
            metavar=_METAVARS.get(name),
            **_BOUNDS.get(name, {}),
        )
        for name, (kind, text, default) in _SAMPLING.items()
    ]


def _sampling_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters of the flags that are given, by name. Raises `InputError`."""
    chosen = {name: value for name, value in given.items() if value is not None}
    if "choices" in chosen:
        chosen["choices"] = tuple(text.strip() for text in chosen["choices"].split(","))
    if (path := chosen.pop("json_schema", None)) is not None:
        try:
            chosen["schema"] = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"--json-schema {path} cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise InputError(f"--json-schema {path} is not JSON: {error}") from error
        if not isinstance(chosen["schema"], dict):
            raise InputError(f"--json-schema {path}: must hold a JSON Schema, an object")
    return chosen


def with_engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with a flag for each option of the engine in place of its parameter `engine: EngineConfig`.

    An option that is out of range is an `InputError`.
    """

    def config_of(given: dict[str, Any]) -> EngineConfig:
        try:
            return EngineConfig(**{name: value for name, value in given.items() if value is not None})
        except ValueError as error:
            raise InputError(str(error)) from error

    return with_flags(command, "engine", [_engine_flag(option) for option in engine_options()], config_of)


def _engine_flag(option: EngineOption) -> inspect.Parameter:
    kinds = get_args(option.annotation) if get_origin(option.annotation) in (Union, UnionType) else (option.annotation,)
    kind = next(each for each in kinds if each is not type(None))
    metavar = None
    if get_origin(kind) is Literal:
        kind, metavar = str, "|".join(get_args(kind))
    elif option.name == "kv_memory":
        kind, metavar = str, "SIZE"
    default = "" if option.default is None else str(option.default)
    return flag(
        option.name, kind, option.help, option.group, default.lower() if kind is bool else default, metavar=metavar
    )


def flag(
    name: str,
    kind: Any,
    help: str,  # noqa: A002 - as in Typer
    group: str | None = None,
    default: str = "",
    **more: Any,
) -> inspect.Parameter:
    """Return the parameter of an option `--name`, whose value is a `kind`, or None where it is not given.

    `group`: its heading in the help. `default`: what leaving it out means; empty where that needs no mention.
    """
    dashed = name.replace("_", "-")
    names = f"--{dashed}/--no-{dashed}" if kind is bool else f"--{dashed}"
    description = f"{help} (default: {default})" if default else help
    option = typer.Option(names, help=description, rich_help_panel=group, show_default=False, **more)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
