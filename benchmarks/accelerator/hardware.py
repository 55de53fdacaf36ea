"""What the device can do: how fast it copies, and how fast it multiplies matrices of the model's shapes."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import torch
import transformers

from batchwright.engine.bodies.linear import Linear, make_linear
from benchmarks.accelerator.results import Bandwidth, Host, Products, Result
from benchmarks.accelerator.shapes import Shape
from benchmarks.accelerator.timing import median_seconds
from benchmarks.throughput.report import machine
from benchmarks.throughput.workers.products import step_shapes

_ROUNDS = 10


def measure_hardware(shape: Shape, device: torch.device) -> Iterator[Result]:
    """The host, the bandwidth of a copy, and the products of a step at each number of rows."""
    yield describe(device)
    yield Bandwidth(2 * shape.copy_bytes / _copy_seconds(shape.copy_bytes, device))
    # Every layer has weights of its own, as in the model: none is in a cache when its turn comes again.
    *layers, head = [(fan_in, _product(fan_in, fan_out, device)) for fan_in, fan_out in step_shapes(dict(shape.config))]
    for rows in shape.product_rows:
        yield Products(rows, _seconds(layers, rows, device), _seconds([head], rows, device))


def describe(device: torch.device) -> Host:
    software = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    if device.type != "cuda":
        host = machine()
        return Host(f"{host['processor']}, {host['cores']} cores", software)
    properties = torch.cuda.get_device_properties(device)
    return Host(
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB", f"{software}, CUDA {torch.version.cuda}"
    )


def _copy_seconds(size: int, device: torch.device) -> float:
    source = torch.full((size,), 1, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return median_seconds(lambda: target.copy_(source), device, _ROUNDS)


def _product(fan_in: int, fan_out: int, device: torch.device) -> Linear:
    # Random values: a GPU clocks higher on zeros.
    return make_linear(torch.empty(fan_out, fan_in, dtype=torch.bfloat16, device=device).normal_())


@torch.inference_mode()
def _seconds(products: list[tuple[int, Linear]], rows: int, device: torch.device) -> float:
    inputs = {
        fan_in: torch.empty(rows, fan_in, dtype=torch.bfloat16, device=device).normal_() for fan_in, _ in products
    }

    def step() -> None:
        for fan_in, product in products:
            product(inputs[fan_in])

    return median_seconds(step, device, _ROUNDS)
