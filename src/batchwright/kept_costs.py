"""Step costs kept in the cache folder: how long the steps of a model took on this machine, in a file for each.

Every run rewrites `costs/KEY.json` below `cache_dir()`. It holds the latest measurements of each kind of step, and the
facts about the engine that are known only once it is loaded, so that times can be predicted without loading it. The key
is made of the model's files, the options that choose how it is computed, the machine, and the version of the kernels. A
file that is broken, or of another form, is ignored.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from batchwright.cgroups import threads_for
from batchwright.durable_files import remove_oldest, write_shared
from batchwright.engine_config import EngineConfig
from batchwright.models import cache_dir, fingerprint
from batchwright.scheduling.sizes import EngineSizes
from batchwright.scheduling.slo import StepShape
from batchwright.scheduling.step_costs import Measurement, StepCosts, StepRecord, fitted
from batchwright.version import __version__

_log = logging.getLogger(__name__)

_SCHEMA = 1
_FOLDER = "costs"
_MOST_FILES = 64
_LEAST_STEPS = 32
"""Steps that must have been measured for a cost model."""
_LEAST_STEP = 1e-9
"""Least seconds that a step can take."""
_LEAST_SECONDS = 1.0
"""Seconds of a run's steps from which on they are compared with their prediction."""
_MOST_WEIGHT = 20_000.0
"""Most steps that the measurements of a file stand for."""
_MOST_RATIOS = 64
_MOST_QUANTITY = 2**53
"""Bound of whole numbers in a file, beyond which they are not measurements."""
_MOST_ERROR = 0.6
"""Error within which a cost model must predict nine steps in ten; otherwise the machine was busy elsewhere."""
_OPTIONS = ("dtype", "quantization", "deterministic", "device", "tensor_parallel", "body", "attention")
"""Options of the engine that change how long steps of the same shape take."""
_KERNELS = Path(__file__).parent / "engine" / "native"


class EngineFacts(msgspec.Struct, frozen=True):
    """Facts about an engine that depend on its model, the options in the key, and the machine."""

    device: str
    """Kind of device, such as cpu."""
    block_bytes: int
    """Bytes of a block of the KV cache, over all layers."""
    free_bytes: int
    """Memory that was free for the KV cache."""
    max_model_len: int
    """Greatest number of tokens of a prompt and its answer."""

    def sizes(self, config: EngineConfig) -> EngineSizes:
        """Return the sizes of the engine. Raises ValueError for an option that does not fit."""
        return EngineSizes.of(
            config,
            device=self.device,
            block_bytes=self.block_bytes,
            free_bytes=self.free_bytes,
            max_model_len=self.max_model_len,
        )


class KeptCosts(msgspec.Struct, frozen=True):
    """Content of a file."""

    schema: int
    identity: Mapping[str, str]
    """What the costs are of: model, options, machine, version."""
    facts: EngineFacts
    steps: int
    """Steps measured, over all runs."""
    measurements: tuple[tuple[int, int, int, int, int, float], ...]
    """Quantities of a `StepShape`, and the seconds that it took."""
    weights: tuple[float, ...] = ()
    """Number of steps that each measurement stands for; empty: one each."""
    run_ratios: tuple[float, ...] = ()
    """For each of the latest runs, the seconds of its steps over those that the model known before had predicted."""

    def may_be_of(self, model: str) -> bool:
        """Return whether these may be costs of `model`: false only if they are known to be those of another.

        A hub id and files cannot be compared. Raises what `fingerprint` raises.
        """
        measured, given = self.identity.get("model"), fingerprint(model)
        return measured is None or measured == given or ("/" in measured) != ("/" in given)

    def measured_otherwise(self, chosen: Mapping[str, Any]) -> Mapping[str, str]:
        """Return the options of the engine, by name, with which these were measured, where others are `chosen`.

        An option that is or was left to the engine (None, auto), or that the file does not have, is no other one.
        """
        given = {name: str(chosen[name]) for name in _OPTIONS if chosen.get(name) not in (None, "auto")}
        found = {name: self.identity[name] for name in given if name in self.identity}
        if "device" in found:
            # Devices of a kind take the same time.
            given["device"] = given["device"].partition(":")[0]
            found["device"] = self.facts.device
        return {name: value for name, value in found.items() if value not in (given[name], "auto")}

    @property
    def record(self) -> StepRecord:
        """The measurements."""
        weights = self.weights or (1.0,) * len(self.measurements)
        return StepRecord(
            Measurement(StepShape(*shape), seconds, weight)
            for (*shape, seconds), weight in zip(self.measurements, weights, strict=True)
        )

    @property
    def costs(self) -> StepCosts:
        """Cost model fitted to these measurements."""
        return replace(fitted(self.record.measurements), steps=self.steps)


def read_costs(path: Path) -> KeptCosts:
    """Return the costs in a file. Raises OSError, or ValueError for a file that holds none."""
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=KeptCosts)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} holds no step costs: {error}") from error
    if kept.schema != _SCHEMA:
        raise ValueError(f"{path} has schema {kept.schema} of step costs, not {_SCHEMA}")
    if len(kept.measurements) < _LEAST_STEPS or any(
        not _LEAST_STEP <= seconds < float("inf") or not 0 <= min(shape) <= max(shape) <= _MOST_QUANTITY
        for *shape, seconds in kept.measurements
    ):
        raise ValueError(f"{path} holds no step costs: {len(kept.measurements)} measurements, or one that is none")
    if kept.weights and (len(kept.weights) != len(kept.measurements) or not 0.0 < min(kept.weights) < float("inf")):
        raise ValueError(
            f"{path} holds {len(kept.measurements)} measurements and {len(kept.weights)} weights: there must be as"
            " many, each above 0"
        )
    facts = kept.facts
    for name, value, least in (
        ("steps", kept.steps, 1),
        ("facts.block_bytes", facts.block_bytes, 1),
        ("facts.free_bytes", facts.free_bytes, 0),
        ("facts.max_model_len", facts.max_model_len, 2),
    ):
        if not least <= value <= _MOST_QUANTITY:
            raise ValueError(f"{path} has {name}={value}: must be from {least} to {_MOST_QUANTITY:,}")
    return kept


def find_costs(model: str, config: EngineConfig) -> KeptCosts | None:
    """Return the costs kept for `model`, computed with `config` on this machine; None if there are none of use.

    Raises what `fingerprint` raises for a model that does not exist.
    """
    path = _path(_identity(model, config))
    try:
        kept = read_costs(path)
        if (error := kept.costs.within(0.9)) > _MOST_ERROR:
            raise ValueError(
                f"{path} holds steps of a busy machine: the cost model is off by up to {error:.0%} for nine in ten"
            )
        return kept
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _say_ignored(str(error))
        return None


@cache
def _say_ignored(reason: str) -> None:
    """Warn that costs are ignored, once for each reason: a command looks for the same file several times."""
    _log.warning("step costs are ignored: %s", reason)


def keep_costs(
    model: str, config: EngineConfig, facts: EngineFacts, record: StepRecord, *, is_run: bool = True
) -> KeptCosts | None:
    """Add the measurements of an engine to those kept for its model, and return all of them.

    Returns None, and keeps nothing, if they are too few. Raises nothing: a cache that cannot be written costs the next
    forecast a probe.

    `is_run`: whether it was a run, whose steps are compared with their prediction.
    """
    try:
        identity = _identity(model, config)
        before = find_costs(model, config)
        merged = StepRecord() if before is None else before.record
        merged.include(record)
        latest = merged.measurements
        measurements = tuple(
            (
                each.shape.prefill_tokens,
                each.shape.prefill_pairs,
                each.shape.decode_rows,
                each.shape.decode_keys,
                each.shape.sampled_rows,
                each.seconds,
            )
            for each in latest
        )
        # Older steps count less and less.
        fading = min(1.0, _MOST_WEIGHT / sum(each.weight for each in latest)) if latest else 1.0
        weights = tuple(each.weight * fading for each in latest)
        steps = record.added + (0 if before is None else before.steps)
        ratios = () if before is None else before.run_ratios
        if is_run and before is not None and record.seconds >= _LEAST_SECONDS:
            ratios = (*ratios, record.seconds / before.costs.total(record))[-_MOST_RATIOS:]
        kept = KeptCosts(_SCHEMA, identity, facts, steps, measurements, weights, ratios)
        if len(measurements) < _LEAST_STEPS:
            return None
        write_costs(_path(identity), kept)
        remove_oldest(cache_dir() / _FOLDER, "*.json", _MOST_FILES)
    except Exception as error:  # whatever is wrong with the cache or the files: the work is done
        _log.warning("step costs are not kept: %s", error)
        return None
    return kept


def write_costs(path: Path, kept: KeptCosts) -> None:
    """Write a file that `read_costs` reads, whole or not at all. Raises OSError."""
    write_shared(path, msgspec.json.encode(kept))


def machine() -> str:
    """Return the name of the processor with the number of its cores that may be used, and those of GPUs."""
    return ", ".join([f"{_cores()} x {_processor()}", *_gpus()])


def _threads() -> str:
    """Return how many threads compute, as `batchwright.engine` decides it, without importing that."""
    return os.environ.get("OMP_NUM_THREADS") or str(threads_for(_cores()))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    found = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with suppress(OSError):
            lines = path.read_text(encoding="utf-8").splitlines()
            found += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return found


def _identity(model: str, config: EngineConfig) -> dict[str, str]:
    chosen = {name: str(getattr(config, name)) for name in _OPTIONS}
    kernels = hashlib.sha256()
    for path in sorted([*_KERNELS.glob("*.cpp"), *_KERNELS.glob("*.h")]):
        kernels.update(path.read_bytes())
    return {
        "model": fingerprint(model),
        **chosen,
        "machine": machine(),
        "threads": _threads(),
        "version": f"{__version__} {kernels.hexdigest()[:16]}",
    }


def _path(identity: Mapping[str, str]) -> Path:
    key = hashlib.sha256(msgspec.json.encode(identity, order="sorted")).hexdigest()[:32]
    return cache_dir() / _FOLDER / f"{key}.json"
