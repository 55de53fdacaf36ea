"""Fixtures for the whole suite."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import tests.cores  # noqa: F401  before any test imports torch
from hypothesis import HealthCheck, settings
from stamina.instrumentation import set_on_retry_hooks
from tests import long_form

import batchwright.engine  # noqa: F401  before any test imports torch: it settles how OpenMP's threads wait
from batchwright.models import DEFAULT_MODEL, resolve
from batchwright.models.cache import MANIFEST, cache_dir

# The same examples on every run, and no failure because a machine is slow.
settings.register_profile(
    "suite", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the long forms of campaigns, too")


def pytest_configure(config: pytest.Config) -> None:
    long_form.choose(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if not long_form.is_chosen(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = filter(long_form.is_chosen, items)
    for item in items:
        if "smollm2_path" in getattr(item, "fixturenames", ()):
            item.add_marker("needs_model")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The folder of the default model, in the user's own cache: fetched by the first run, found by later ones."""
    return resolve(DEFAULT_MODEL, progress=print)


_LAYERS = (0, 1, 2, 3, 28, 29)
"""With the last two, whose texts differ as those of the whole model do; without them every text is ", and, and"."""


@pytest.fixture(scope="session")
def shallow_path(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 6 of the default model's 30 layers, with its tokenizer and vocabulary.

    For tests that compare one way of computing with another, whatever the text is: they take a third of the time.
    """
    folder = tmp_path_factory.mktemp("shallow")
    shutil.copytree(smollm2_path, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": len(_LAYERS)}), encoding="utf-8")
    from safetensors.torch import load_file, save_file

    kept = {}
    for name, weight in load_file(smollm2_path / "model.safetensors").items():
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if found is None:
            kept[name] = weight
        elif int(found[1]) in _LAYERS:
            kept[f"model.layers.{_LAYERS.index(int(found[1]))}.{found[2]}"] = weight
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    manifest["files"] = {name: (folder / name).stat().st_size for name in manifest["files"]}
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def shallow_cache(smollm2_path: Path, shallow_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that knows the shallow model by the name of the default one, for tests that use it by name.

    Its other models, compiled kernels and rates of this machine are those of the user's cache.
    """
    resolve("minilm", progress=print)
    folder, users = tmp_path_factory.mktemp("cache"), cache_dir()
    for name in ("native", "rates", "locks"):
        (users / name).mkdir(exist_ok=True)
        (folder / name).symlink_to(users / name)
    (folder / "models").mkdir()
    for model in (users / "models").iterdir():
        (folder / "models" / model.name).symlink_to(shallow_path if model == smollm2_path else model)
    return folder


@pytest.fixture(scope="session")
def narrow_path(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two narrow layers, with the default model's tokenizer and vocabulary.

    For tests to which a text is any text: a step takes a twentieth of the time of the default model's. Some tokens are
    far likelier than others, and one in some 25 is the end of the text.
    """
    folder = tmp_path_factory.mktemp("narrow")
    shutil.copytree(smollm2_path, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    config = AutoConfig.from_pretrained(smollm2_path, **sizes, **heads)
    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM.from_config
    model = make(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
        model.lm_head.weight[config.eos_token_id] *= 2.5
    model.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A handler that a test left behind would write to that test's closed standard error."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    if structlog.is_configured():
        structlog.reset_defaults()
        set_on_retry_hooks(None)
