"""The resources of its node that each replica on a Ray cluster takes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from batchwright.errors import InputError, shown

_EXAMPLE = '{"num_gpus": 1}'
_KEYS = ("num_cpus", "num_gpus", "memory", "accelerator_type", "resources")
_ACCELERATOR_SHARE = 0.001
"""Amount that Ray requests of the resource that identifies nodes with a type of accelerator."""


@dataclass(frozen=True, slots=True)
class RayResources:
    """Resources of one replica, by the names that Ray gives them."""

    num_cpus: float = 1
    num_gpus: float = 0
    memory: int = 0
    """Bytes; 0: not counted."""
    accelerator_type: str | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    """Amounts of resources with custom names of the cluster."""

    @classmethod
    def of(cls, given: RayResources | Mapping[str, Any] | str | None) -> RayResources:
        """Return the resources in an option: JSON, or a mapping. Raises `InputError`."""
        if given is None or isinstance(given, RayResources):
            return given or cls()
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError as error:
                raise InputError(f"resources={given!r}: no JSON ({error}); write {_EXAMPLE}") from None
        if not isinstance(given, Mapping):
            raise InputError(f"resources={shown(given)}: must be an object such as {_EXAMPLE}")
        for name in given:
            if name not in _KEYS:
                near = get_close_matches(str(name), _KEYS, 1)
                raise InputError(
                    f"resources: there is no {name!r}"
                    + (f", did you mean {near[0]!r}?" if near else "")
                    + f" Choose from {', '.join(_KEYS)}; names of the cluster's own go into resources"
                )
        accelerator, own = given.get("accelerator_type"), given.get("resources", {})
        if accelerator is not None and not (isinstance(accelerator, str) and accelerator):
            raise InputError(f"resources: accelerator_type={shown(accelerator)}: must be a name such as 'A100'")
        if not isinstance(own, Mapping):
            raise InputError(f"resources: resources={shown(own)}: must be an object of amounts by name")
        return cls(
            num_cpus=_amount("num_cpus", given.get("num_cpus", 1)),
            num_gpus=_amount("num_gpus", given.get("num_gpus", 0)),
            memory=int(_amount("memory", given.get("memory", 0))),
            accelerator_type=accelerator,
            resources={str(name): _amount(f"resources[{name!r}]", amount) for name, amount in own.items()},
        )

    @property
    def bundle(self) -> dict[str, float]:
        """The resources as a bundle of a placement group."""
        amounts = {"CPU": self.num_cpus, "GPU": self.num_gpus, "memory": self.memory, **self.resources}
        if self.accelerator_type is not None:
            amounts[f"accelerator_type:{self.accelerator_type}"] = _ACCELERATOR_SHARE
        # A bundle must request something.
        return {name: amount for name, amount in amounts.items() if amount} or {"CPU": 0.001}

    @property
    def threads(self) -> int | None:
        """Threads of a replica that computes on CPUs; None if it computes on a GPU."""
        return None if self.num_gpus else max(1, int(self.num_cpus))

    def __str__(self) -> str:
        return ", ".join(f"{amount:g} {name}" for name, amount in self.bundle.items())


def _amount(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise InputError(f"resources: {name}={shown(value)}: must be a number that is not below 0")
    return value
