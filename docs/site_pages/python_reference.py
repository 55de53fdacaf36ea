"""The reference of the Python API: every public name, by subject, from its docstring."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import batchwright
import batchwright.ray

SUBJECTS: Mapping[str, Sequence[str]] = {
    "Files": ("run", "map", "RunReport", "RunProgress", "RunInterrupted"),
    "The engine": (
        "Engine", "AsyncEngine", "EngineConfig", "EngineStats", "StaticGenerator", "SamplingParams", "Prompt",
        "InferenceRequest", "InferenceResponse", "Choice", "TokenLogprob", "Usage", "Score", "StreamEvent",
        "Flow",
    ),
    "Encoders": ("Encoder", "Classifier", "Ranked", "EncoderStats"),
    "Batching any function": (
        "batched", "Batcher", "SimpleBatcher", "AdaptiveBatcher", "LengthAwareBatcher", "PriorityBatcher",
        "PrioritizedRequest", "MemoryEfficientBatcher", "TimeBasedBatcher", "ContinuousBatcher",
        "ParallelBatchProcessor", "StreamingBatchProcessor", "AsyncBatchProcessor", "AsyncBatchConfig",
        "BatcherStats", "ContinuousStats",
        "WrongOutputs", "export_metrics",
    ),
    "Models of the service": ("BatchRequest", "BatchResponse", "AsyncBatchRequest", "BatchStatus"),
    "Padding": ("PaddingOptimizer", "BucketedPadding", "PackedSequences", "PaddingConfig"),
}  # fmt: skip
"""Public names by subject. Errors are a subject of their own."""
MODULES: Mapping[str, Any] = {"Ray Data": batchwright.ray}
"""Modules whose public names are not in `batchwright` itself, by subject."""


class Undocumented(Exception):
    """Public names that have no docstring, or stand under no subject."""


def subjects() -> dict[str, list[str]]:
    """Return all public names by subject. Raises `Undocumented`."""
    errors = [name for name in batchwright.__all__ if _is_error(getattr(batchwright, name))]
    found = {**{subject: [*names] for subject, names in SUBJECTS.items()}}
    named = {name for names in found.values() for name in names}
    found["Errors"] = [name for name in errors if name not in named]
    missing = set(batchwright.__all__) - named - set(found["Errors"]) - {"__version__"}
    unknown = named - set(batchwright.__all__)
    if missing or unknown:
        raise Undocumented(f"{__name__}: no subject has {sorted(missing)}, and {sorted(unknown)} are not public")
    return found


def undocumented() -> list[str]:
    """Return the public names, and the public methods and properties of public classes, that have no docstring."""
    return [
        where
        for name, value in _public()
        for where, each in [(name, value), *_members(name, value)]
        if not _is_documented(each)
    ]


def page() -> str:
    """Return the page. Raises `Undocumented`."""
    if names := undocumented():
        raise Undocumented(f"public names without a docstring: {', '.join(names)}")
    introduction = "Everything in `batchwright.__all__`, and public modules. Names are loaded when they are first used."
    parts = ["# Python", introduction]
    for subject, names in subjects().items():
        parts += [f"## {subject}", *(f"::: batchwright.{name}" for name in names)]
    for subject, module in MODULES.items():
        parts += [f"## {subject}", *(f"::: {module.__name__}.{name}" for name in module.__all__)]
    return "\n\n".join(parts) + "\n"


def _is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseException)


def _is_documented(value: Any) -> bool:
    # Types that are only names, such as `Prompt`, have the text below their assignment, which nothing keeps.
    return (
        bool(inspect.getdoc(value))
        if inspect.isclass(value) or inspect.isroutine(value) or isinstance(value, property)
        else True
    )


def _public() -> Iterator[tuple[str, Any]]:
    for name in batchwright.__all__:
        if name != "__version__":
            yield name, getattr(batchwright, name)
    for module in MODULES.values():
        for name in module.__all__:
            yield f"{module.__name__}.{name}", getattr(module, name)


def _members(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not inspect.isclass(value):
        return
    for base in value.__mro__:
        if base.__module__.startswith("batchwright"):
            for member, each in vars(base).items():
                plain = each.__func__ if isinstance(each, (classmethod, staticmethod)) else each
                if not member.startswith("_") and (inspect.isroutine(plain) or isinstance(plain, property)):
                    yield f"{name}.{member}", plain
