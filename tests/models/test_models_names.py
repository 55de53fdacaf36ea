"""What a name may be: folders, hub ids, and names that lead nowhere."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from batchwright.errors import DownloadError, ModelNotFound, UnsupportedModel
from batchwright.models import cache_dir, resolve, served_name

COMMIT = "c0ffee" + "0" * 34


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATCHWRIGHT_CACHE", "here")
    assert cache_dir() == tmp_path / "here"
    monkeypatch.delenv("BATCHWRIGHT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir().name == "batchwright"


def test_a_folder_is_used_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_root: Path) -> None:
    folder = write_model(tmp_path / "org" / "model")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/model", pull=False) == folder
    assert not cache_root.exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_an_incomplete_folder_says_what_it_lacks(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path / "m")
    (folder / name).unlink()
    with pytest.raises(ModelNotFound, match=r"lacks (config\.json|\*\.safetensors)$"):
        resolve(str(folder))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "part-2.safetensors"}}))
    with pytest.raises(ModelNotFound, match=r"lacks part-2\.safetensors$"):
        resolve(str(folder))


@pytest.mark.parametrize(("name", "remedy"), [("m.gguf", "m.gguf"), ("pytorch_model.bin", "save_pretrained")])
def test_weights_in_another_format(tmp_path: Path, name: str, remedy: str) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(UnsupportedModel, match=remedy):
        resolve(str(folder))


@pytest.mark.parametrize("name", ["", "   ", "gpt-17", "smollm", "SmolLM2-135M"])
def test_an_unknown_name_lists_the_built_in_ones(name: str) -> None:
    with pytest.raises(ModelNotFound, match="smollm2-135m, minilm") as caught:
        resolve(name)
    assert ("did you mean smollm2-135m" in str(caught.value)) == ("smol" in name.lower())


@pytest.mark.parametrize("name", ["./m", "/no/such/place", "a/b/c", "m.gguf", "org/m.gguf", "../m", "~/no-such"])
def test_a_path_that_leads_nowhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(ModelNotFound, match="no file or folder"):
        resolve(name)


class Hub(BaseHTTPRequestHandler):
    """As much of a model hub as `org/tiny` and `org/pickled` need."""

    files: ClassVar[dict[str, bytes]] = {
        "config.json": b"{}",
        "model.safetensors": b"weights",
        "tokenizer.json": b"{}",
        "generation_config.json": b"{}",
        "onnx/model.safetensors": b"copy",
        "a.bin": b"x",
    }

    def do_GET(self) -> None:
        self._answer(send_body=True)

    def do_HEAD(self) -> None:
        self._answer(send_body=False)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, *, send_body: bool) -> None:
        path = self.path.partition("?")[0]
        name = path.partition(f"/org/tiny/resolve/{COMMIT}/")[2]
        tree = [
            {"type": "file", "path": name, "size": len(body), "oid": f"{index:040x}"}
            for index, (name, body) in enumerate(self.files.items())
        ]
        info = {"id": "org/tiny", "sha": COMMIT, "siblings": [{"rfilename": f, "size": 1} for f in self.files]}
        if name in self.files:
            self._send(self.files[name], send_body)
        elif path.startswith("/api/models/org/tiny/tree/"):
            self._send(json.dumps(tree).encode(), send_body)
        elif path.startswith("/api/models/org/tiny"):
            self._send(json.dumps(info).encode(), send_body)
        elif path.startswith("/api/models/org/pickled"):
            self._send(json.dumps(info | {"siblings": [{"rfilename": "a.bin", "size": 1}]}).encode(), send_body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _send(self, body: bytes, send_body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hash(body) & 0xFFFF:x}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if send_body:
            self.wfile.write(body)


@contextmanager
def serving() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:1/{repo_id}/resolve/{revision}/{filename}"
    )
    return tmp_path / "hub"


def test_a_hub_that_cannot_be_reached(hub_cache: Path) -> None:
    with pytest.raises(DownloadError, match=r"cannot fetch org/tiny from the model hub: .*refused"):
        resolve("org/tiny")


def test_a_hub_that_may_not_be_asked(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE forbids"):
        resolve("org/tiny")


def test_a_snapshot_in_the_hub_cache_needs_no_hub(hub_cache: Path) -> None:
    repository = hub_cache / "models--org--tiny"
    snapshot = write_model(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    assert resolve("org/tiny") == resolve("org/tiny", pull=False) == snapshot
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="not in the hub cache"):
        resolve("org/tiny", pull=False)


def test_a_snapshot_that_another_program_fetched_in_part(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    with serving() as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        folder = resolve("org/tiny")
        (folder / "tokenizer.json").unlink()
        assert resolve("org/tiny") == folder
        assert (folder / "tokenizer.json").exists()
    (folder / "generation_config.json").unlink()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert resolve("org/tiny") == resolve("org/tiny", pull=False) == folder


def test_download_takes_what_is_needed_and_no_more(
    hub_cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    lines: list[str] = []
    with serving() as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        folder = resolve("org/tiny", progress=lines.append)
        with pytest.raises(ModelNotFound, match="no model org/other"):
            resolve("org/other")
        with pytest.raises(UnsupportedModel, match=r"no safetensors weights on the hub, only a\.bin"):
            resolve("org/pickled")
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert lines == ["downloading org/tiny from the model hub (0 MB)"]
    assert capfd.readouterr() == ("", "")
    assert resolve("org/tiny", pull=False) == folder


@pytest.mark.parametrize(
    ("given", "served"),
    [
        ("./folder", "folder"),
        (".//a/b/", "a/b"),
        ("././a", "a"),
        ("../a", "../a"),
        ("./../a", "../a"),
        ("/a/b", "/a/b"),
        ("./minilm", "./minilm"),
        ("minilm", "minilm"),
        ("./", "./"),
        ("org/model", "org/model"),
    ],
)
def test_served_names_of_folders(given: str, served: str) -> None:
    assert served_name(given) == served
