"""The options of the engine: the one list from which arguments, flags, environment variables and settings are made."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, Self, TypeAlias, get_args, get_type_hints

from batchwright.errors import shown

DtypeName: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]
QuantizationName: TypeAlias = Literal["int8", "int8-group", "int4", "fp8"]
BodyName: TypeAlias = Literal["auto", "fused", "transformers"]
AttentionName: TypeAlias = Literal["auto", "native", "fa3", "triton", "sdpa", "reference"]
OptionGroup: TypeAlias = Literal["Engine", "Two classes of traffic"]
WeightsForm: TypeAlias = Literal["numbers", "values"]
"""Quantized weights of a GGUF file: the numbers that it has, with their scales, or the values that these stand for."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def _option(default: Any, description: str, *, group: OptionGroup = "Engine", changes_results: bool = False) -> Any:
    return field(default=default, metadata={"help": description, "group": group, "changes_results": changes_results})


DEFAULT_MAX_NUM_SEQS = 256


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine computes.

    `deterministic=True` promises that the result of a request, including log-probabilities, is bitwise independent of
    what else is in the batch (batch invariance), of preemption, of prefix-cache hits and of the sizes of steps; a
    request that is sampled needs a seed for that. Where this cannot be promised, creating the engine raises
    `UnsupportedModel` with the reason and the remedy.

    Requests with `traffic="batch"` use what online ones leave. `ttft_ms` and `tpot_ms` are the targets for online
    requests, to the first token and for each token after it: steps carry no more batch tokens than these allow. Batches
    get at least the share `batch_share` (0 ≤ share < 1) of all tokens computed, however much online traffic there is,
    as far as the same share of `max_num_seqs` (at least one sequence) can use it; 0 lets online traffic starve them.
    Within a class of traffic, a request that is `promote_after` seconds old goes ahead of all priorities; None turns
    that off.

    Raises ValueError that names the option, its value and what it must be. Whatever depends on the model or the machine
    is checked when the engine is created.
    """

    dtype: DtypeName = _option(
        "auto",
        "auto, float32, bfloat16 or float16. auto: bfloat16 where it is fast, otherwise float32.",
        changes_results=True,
    )
    quantization: QuantizationName | None = _option(
        None,
        "int8: multiply in 8 bits; compiled layers also store keys and values in 8 bits. int8-group: multiply in 8 "
        "bits with a scale for each 32 values, which loses less. int4: the same with weights of 4 bits. Both on CPUs, "
        "in compiled layers. fp8: 8-bit floating point, on CUDA from compute capability 8.9 on. Default: none, or that "
        "of a checkpoint that is quantized already.",
        changes_results=True,
    )
    deterministic: bool = _option(
        False,
        "Guarantee that an answer is bitwise independent of what else is computed with it; where that is "
        "impossible, refuse to start and say why.",
        changes_results=True,
    )
    device: str = _option("auto", "auto, cpu, cuda or cuda:N.")
    tensor_parallel: int = _option(
        1,
        "Number of processes that share the model, for one that does not fit one device: each has a GPU, or a group of "
        "cores, and holds a part of each layer. The Llama family only, in float32, bfloat16 or float16.",
    )
    max_batch_tokens: int | None = _option(None, "Most tokens computed in a step. Default: 512 on a CPU, 8192 on CUDA.")
    max_num_seqs: int | None = _option(None, f"Most sequences in a step. Default: {DEFAULT_MAX_NUM_SEQS}.")
    max_model_len: int | None = _option(
        None,
        "Most tokens of a prompt and its answer together. Default: the limit of the model.",
        changes_results=True,
    )
    kv_memory: int | str | None = _option(
        None, "Memory for the KV cache, such as 2GiB. Default: a share of the free memory."
    )
    prefix_caching: bool = _option(True, "Reuse keys and values of prompts that begin alike.")
    drafting: bool = _option(
        True, "Fill small steps with guesses of the next tokens of greedy requests; no token is changed."
    )
    body: BodyName = _option(
        "auto",
        "Implementation of the model: fused (the Llama family), transformers (any architecture), or auto, the "
        "fastest that supports the model.",
        changes_results=True,
    )
    attention: AttentionName = _option(
        "auto",
        "Implementation of attention: native, fa3, triton, sdpa, reference, or auto, the fastest that works here.",
        changes_results=True,
    )
    ttft_ms: float | None = _option(
        None,
        "Goal for an online request's first token, in milliseconds. Default: none.",
        group="Two classes of traffic",
    )
    tpot_ms: float | None = _option(
        None,
        "Goal for the time between two tokens of an online request, in milliseconds; it limits the batch tokens "
        "of a step. Default: none.",
        group="Two classes of traffic",
    )
    batch_share: float = _option(
        0.05,
        "Least share of the engine's tokens for batch lines, however many online requests there are.",
        group="Two classes of traffic",
    )
    promote_after: float | None = _option(
        60.0,
        "Seconds of waiting after which a request goes before all priorities of its class.",
        group="Two classes of traffic",
    )

    def __post_init__(self) -> None:
        for name, choices in (("dtype", DtypeName), ("body", BodyName), ("attention", AttentionName)):
            _require_choice(name, getattr(self, name), get_args(choices))
        if self.quantization not in (None, *get_args(QuantizationName)):
            raise ValueError(
                f"quantization={shown(self.quantization)}: must be one of {', '.join(get_args(QuantizationName))}, or "
                "None for the weights as they are"
            )
        for name in ("max_batch_tokens", "max_num_seqs", "max_model_len"):
            _require_count(name, getattr(self, name))
        self._check_tensor_parallel()
        for name in ("ttft_ms", "tpot_ms"):
            _require_positive(name, getattr(self, name), "leave it out for no bound")
        _require_positive("promote_after", self.promote_after, "leave it out for 60, or in Python give None for never")
        if not _is_number(self.batch_share) or not 0.0 <= self.batch_share < 1.0:
            raise ValueError(f"batch_share={shown(self.batch_share)}: must be at least 0 and less than 1, such as 0.05")
        if self.kv_memory is not None:
            parse_bytes(self.kv_memory)

    def _check_tensor_parallel(self) -> None:
        if self.tensor_parallel is None:
            raise ValueError("tensor_parallel=None: must be a whole number; 1 is a model in one process")
        _require_count("tensor_parallel", self.tensor_parallel)
        if self.tensor_parallel == 1:
            return
        beside = f"with tensor_parallel={self.tensor_parallel}"
        if self.quantization is not None:
            raise ValueError(
                f"quantization={self.quantization!r} {beside}: a quantized model runs in one process; leave one out"
            )
        if self.deterministic:
            raise ValueError(
                f"deterministic=True {beside}: how sums over processes are rounded may depend on a step; leave one out"
            )
        if self.body == "transformers":
            raise ValueError(f"body='transformers' {beside}: only the fused body is shared; use body='auto'")
        if self.device.startswith("cuda:"):
            raise ValueError(
                f"device={self.device!r} {beside}: each process has a GPU of its own, from the first on; use "
                "device='cuda', and set CUDA_VISIBLE_DEVICES to choose some"
            )

    def with_options(self, **options: Any) -> Self:
        """Return a copy with some options changed. Raises TypeError for an unknown one, and ValueError."""
        names = [each.name for each in fields(self)]
        for name in options:
            if name not in names:
                near = get_close_matches(name, names, 1)
                hint = f"did you mean {near[0]}?" if near else f"the options are: {', '.join(names)}"
                raise TypeError(f"the engine has no option {name!r}; {hint}")
        return replace(self, **options)

    def weights_form(self, *, on_cpu: bool) -> WeightsForm:
        """The form in which the engine reads the weights of a GGUF file."""
        is_plain = self.body != "transformers" and self.quantization is None and self.tensor_parallel == 1
        return "numbers" if is_plain and self.dtype not in ("float32", "float16") and on_cpu else "values"

    def chosen(self) -> Mapping[str, Any]:
        """The options that are not at their default, by name."""
        return {
            option.name: value for option in engine_options() if (value := getattr(self, option.name)) != option.default
        }


@dataclass(frozen=True, slots=True)
class EngineOption:
    """One field of `EngineConfig`, from which flags and settings are made."""

    name: str
    annotation: Any
    default: Any
    help: str
    group: OptionGroup
    changes_results: bool
    """Whether a job with another value is a different job, which does not resume results of the first."""


@cache
def engine_options() -> tuple[EngineOption, ...]:
    """Return all options, in the order of `EngineConfig`."""
    hints = get_type_hints(EngineConfig)
    found = [each for each in fields(EngineConfig) if each.default is not MISSING]
    return tuple(EngineOption(each.name, hints[each.name], each.default, **each.metadata) for each in found)


def parse_bytes(size: int | str) -> int:
    """Return the bytes of `"2GiB"`, `"500MB"` or a number of bytes. Raises ValueError for anything else, and for 0."""
    if isinstance(size, int) and not isinstance(size, bool):
        number = size
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", str(size), re.IGNORECASE)
        if match is None:
            raise ValueError(f"kv_memory={shown(size)}: write it as 2GiB, 500MB or a number of bytes")
        number = int(float(match[1]) * _UNITS[(match[2] or "").lower()])
    if number < 1:
        raise ValueError(f"kv_memory={shown(size)}: must be more than nothing")
    return number


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={shown(value)}: must be one of {', '.join(choices)}")


def _require_count(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={shown(value)}: must be a whole number")
    if value < 1:
        raise ValueError(f"{name}={value}: must be at least 1")


def _require_positive(name: str, value: object, otherwise: str) -> None:
    if value is not None and (not _is_number(value) or not 0 < value < math.inf):  # type: ignore[operator]
        raise ValueError(f"{name}={shown(value)}: must be a number above 0; {otherwise}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
