"""Where the time of a step goes, measured from outside: the engine's parts are wrapped without its knowledge."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchwright.engine.bodies.llama import LlamaBody
    from batchwright.engine.core import EngineCore
    from batchwright.engine.native.decoder import DecoderSeconds
    from batchwright.engine.step.multi_step import DecodedStep


class Stopwatch:
    """Seconds by piece. Pieces nest: a step holds the forward pass, that the products; `take` takes them apart."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._steps = 0
        self._compiled: DecoderSeconds | None = None

    def watch_products(self) -> None:
        """Time torch's matrix products. Before the engine is made: its body keeps the functions that it is given."""
        from batchwright.engine.bodies import composed

        def timed(make: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *arguments: self._timed("products", make(*arguments))

        for name in ("make_linear", "make_quantized_linear"):
            vars(composed)[name] = timed(vars(composed)[name])

    def watch_engine(self, core: EngineCore) -> None:
        """Time the rest. Raises ValueError for a body whose products cannot be distinguished from the rest."""
        from batchwright.engine.bodies.compiled import CompiledStack
        from batchwright.engine.bodies.llama import LlamaBody
        from batchwright.engine.native.decoder import DecoderSeconds
        from batchwright.engine.step import launcher as module

        if not isinstance(core.body, LlamaBody):
            raise ValueError(f"--profile needs the fused body, this model runs on the {core.body.name} one")
        if isinstance(core.body.stack, CompiledStack):
            core.body.stack.seconds = self._compiled = DecoderSeconds()

        self._watch(core, "step", "step")
        self._watch(core.body, "output", "forward")
        self._watch_runs(core.body)
        self._watch(core.body.attention, "attend", "attention")
        self._watch(core.scheduler, "schedule", "scheduling")
        self._watch(core.scheduler, "commit", "scheduling")
        self._watch(module, "build_batch", "scheduling")
        self._watch(module, "sample", "sampling")

    def take(self) -> dict[str, float]:
        """Seconds in each piece since the last call, nothing counted twice, and the number of `steps`."""
        if not self._steps:
            return {}
        seconds, steps = self._seconds, self._steps
        self._seconds, self._steps = defaultdict(float), 0
        if self._compiled is not None:
            seconds["products"], self._compiled.products = self._compiled.products, 0.0
            seconds["attention"], self._compiled.attention = self._compiled.attention, 0.0
        model_rest = seconds["forward"] - seconds["products"] - seconds["attention"]
        python = seconds["step"] - seconds["forward"] - seconds["sampling"] - seconds["scheduling"]
        return {
            "matrix products": seconds["products"],
            "attention": seconds["attention"],
            "rest of the model": model_rest,
            "sampling": seconds["sampling"],
            "scheduling and batch": seconds["scheduling"],
            "other Python": python,
            "steps": steps,
        }

    def _watch_runs(self, body: LlamaBody) -> None:
        """Time the steps that are computed in one call by the times that they report."""
        compute = body.multi_step

        def timed(*arguments: Any) -> list[DecodedStep]:
            steps = compute(*arguments)
            self._seconds["forward"] += sum(step.model for step in steps)
            self._seconds["sampling"] += sum(step.seconds - step.model for step in steps)
            self._steps += len(steps) - 1
            return steps

        vars(body)["multi_step"] = timed

    def _watch(self, owner: object, name: str, piece: str) -> None:
        setattr(owner, name, self._timed(piece, getattr(owner, name)))

    def _timed(self, piece: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self._seconds[piece] += time.perf_counter() - began
                self._steps += piece == "step"

        return timed
