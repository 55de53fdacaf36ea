"""Step costs for commands that tell times: those that runs have kept, else those of a probe of some seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.engine_config import EngineConfig
from batchwright.errors import BatchwrightError, InputError

if TYPE_CHECKING:
    from rich.console import Console

    from batchwright.kept_costs import KeptCosts


def measured_costs(console: Console, model: str, config: EngineConfig) -> KeptCosts:
    """Return the step costs that are kept of `model`, else those of a probe of it, of which `console` tells.

    Raises `InputError` for a model that generates nothing, what loading it raises, and `BatchwrightError` if the probe
    says too little.
    """
    from batchwright.kept_costs import find_costs

    if (kept := find_costs(model, config)) is not None:
        return kept
    from batchwright.inference.loading import load_models

    with console.status("") as status:

        def tell(text: str) -> None:
            status.update(f"no step costs of {model} are kept yet: {text}")

        engine, _ = load_models(model, None, config, tell)
        if engine is None:
            raise InputError(f"{model} generates nothing")
        from batchwright.engine.cost_probe import probe

        tell("measuring steps")
        with engine:
            probe(engine)
            measured = engine.keep_costs()
    if measured is None:
        raise BatchwrightError("the probe measured too few steps: give --costs FILE, or run a job first")
    return measured
