"""What importing a part of the package needs, and what it does to the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

import batchwright

ENGINE = {"AsyncEngine", "Classifier", "Encoder", "EncoderStats", "Engine", "Ranked", "StaticGenerator"}
"""Public names that the extra `engine` is for."""
PROMETHEUS = {"export_metrics"}


SERVER = {"AsyncBatchRequest", "BatchRequest", "BatchResponse", "BatchStatus"}


def _run(code: str, *missing: str) -> str:
    """What `code` prints in a process in which the packages `missing` are not installed."""
    blocked = f"import sys; sys.modules.update(dict.fromkeys({missing!r}))\n"
    done = subprocess.run([sys.executable, "-c", blocked + code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_names_of_the_base_install_need_no_extra() -> None:
    names = sorted(set(batchwright.__all__) - ENGINE - PROMETHEUS - SERVER)
    missing = ("torch", "transformers", "tokenizers", "psutil", "pydantic", "fastapi", "starlette", "apsw", "httpx")
    assert (
        _run(f"import batchwright\nfor name in {names}: getattr(batchwright, name)\nprint('all')", *missing) == "all\n"
    )


@pytest.mark.parametrize("name", sorted(ENGINE))
def test_a_name_of_the_engine_says_which_extra_it_needs(name: str) -> None:
    code = f"import batchwright\ntry: batchwright.{name}\nexcept batchwright.MissingExtra as error: print(error)"
    assert "pip install 'batchwright[engine]'" in _run(code, "torch")


@pytest.mark.parametrize("name", sorted(SERVER))
def test_a_model_of_the_service_says_which_extra_it_needs(name: str) -> None:
    code = f"import batchwright\ntry: batchwright.{name}\nexcept batchwright.MissingExtra as error: print(error)"
    assert "pip install 'batchwright[server]'" in _run(code, "fastapi")


def test_the_model_for_the_harness_says_what_it_needs() -> None:
    code = "import batchwright\ntry: import batchwright.lm_eval\nexcept batchwright.MissingExtra as error: print(error)"
    assert "pip install lm-eval" in _run(code, "lm_eval")


def test_importing_a_batcher_changes_nothing_in_the_process() -> None:
    code = (
        "import os, threading; before = dict(os.environ)\n"
        "from batchwright import Batcher, ContinuousBatcher, batched\n"
        "print('torch' in sys.modules, dict(os.environ) == before, threading.active_count())"
    )
    assert _run(code) == "False True 1\n"


def test_a_headless_worker_needs_no_web_framework() -> None:
    code = "import batchwright.cli.serve, batchwright.service.composition, batchwright.inference.endpoint\nprint('all')"
    assert _run(code, "fastapi", "starlette", "uvicorn", "h11") == "all\n"
