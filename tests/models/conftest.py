"""Small stand-ins for what the models package handles: a wheel, a built-in model, a GGUF file."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchwright.inference.loading import prepare_kernels
from batchwright.models import cache_dir
from batchwright.models.catalog import BUILTIN, BuiltinModel, Format, Kind, Member

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": bytes(range(256)) * 400,
    "1_Pooling/config.json": b"{}",
}


@pytest.fixture(autouse=True)
def cache_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for each test."""
    root = tmp_path / "cache"
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(root))
    monkeypatch.delenv("BATCHWRIGHT_WHEELS", raising=False)
    return root


@pytest.fixture(scope="session")
def compiled() -> list[Path]:
    """The libraries of kernels in the user's own cache, compiled by the first run."""
    prepare_kernels(print)
    return [*(cache_dir() / "native").glob("*.so")]


@pytest.fixture
def with_kernels(compiled: list[Path], cache_root: Path) -> None:
    """Put them into the test's cache."""
    (cache_root / "native").mkdir(parents=True)
    for library in compiled:
        (cache_root / "native" / library.name).symlink_to(library)


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder with the wheel `tiny_model-1.0`, which holds FILES."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        for name, content in FILES.items():
            wheel.writestr(f"tiny_model/{name}", content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture
def tiny(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> BuiltinModel:
    """The built-in model `tiny`, to be had from the folder `wheels`."""
    model = BuiltinModel(
        name="tiny",
        description="a stand-in",
        licence="MIT",
        kind=Kind.EMBED,
        format=Format.FOLDER,
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(next(wheels.iterdir()).read_bytes()).hexdigest(),
        members=tuple(
            Member(f"tiny_model/{name}", hashlib.sha256(content).hexdigest(), name) for name, content in FILES.items()
        ),
        download_bytes=100_000,
        installed_bytes=100_000,
    )
    monkeypatch.setitem(BUILTIN, model.name, model)
    monkeypatch.setenv("BATCHWRIGHT_WHEELS", str(wheels))
    return model


@pytest.fixture
def is_tiny() -> Callable[[Path], bool]:
    """Whether a folder holds exactly the files of the model `tiny`, and its manifest."""

    def check(folder: Path) -> bool:
        found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
        found.pop("batchwright-model.json")
        return {name: path.read_bytes() for name, path in found.items()} == FILES

    return check


@pytest.fixture
def child_program(tiny: BuiltinModel) -> Callable[[str], str]:
    """The text of a program in which `tiny` is built in, that runs `patches` and then resolves it."""

    def program(patches: str) -> str:
        return "\n".join(
            [
                "import os, signal, sys",
                "from batchwright.models import cache, catalog, resolution",
                "from batchwright.models.catalog import BuiltinModel, Format, Kind, Member",
                f"catalog.BUILTIN['tiny'] = BuiltinModel({_arguments(tiny)})",
                "def die(*a, **k): os.kill(os.getpid(), signal.SIGKILL)",
                patches,
                "say = lambda line: print(line, file=sys.stderr, flush=True)",
                "print(resolution.resolve('tiny', progress=say))",
            ]
        )

    return program


def _arguments(model: BuiltinModel) -> str:
    fields: dict[str, Any] = {name: getattr(model, name) for name in model.__dataclass_fields__}
    fields["kind"], fields["format"] = str(model.kind), str(model.format)
    text = {name: repr(value) for name, value in fields.items()}
    text["kind"], text["format"] = f"Kind({text['kind']})", f"Format({text['format']})"
    return ", ".join(f"{name}={value}" for name, value in text.items())
