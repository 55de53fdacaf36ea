"""The pictures by name."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.figure import Figure

from pictures.drawing import loads, rectangles, timelines

PICTURES: dict[str, Callable[[], Figure]] = {
    "auto": timelines.auto,
    "simple": timelines.simple,
    "window": timelines.window,
    "adaptive": loads.adaptive,
    "priority": loads.priority,
    "length-aware": rectangles.length_aware,
    "fair": loads.fair,
    "memory": loads.memory,
    "continuous": rectangles.continuous,
    "streaming": rectangles.streaming,
    "concurrent": timelines.concurrent,
    "parallel": timelines.parallel,
}
