"""Settings: four sources and their order, errors, the page and the flags."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from batchwright.engine_config import EngineConfig
from batchwright.errors import InputError
from batchwright.service.setting_sources import load_settings
from batchwright.service.settings import Settings, has_flag, setting_fields

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [each for each in os.environ if each.startswith("BATCHWRIGHT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))


def _file(folder: Path, text: str) -> Path:
    path = folder / "settings.toml"
    path.write_text(text)
    return path


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _file(tmp_path, "port = 1001\nmax_lines = 1002\nmodel = 'in-file'")
    monkeypatch.setenv("BATCHWRIGHT_PORT", "2001")
    monkeypatch.setenv("BATCHWRIGHT_MAX_LINES", "2002")
    settings = load_settings({"port": "3001", "model": None}, config=path)
    assert (settings.port, settings.max_lines, settings.model) == (3001, 2002, "in-file")
    assert settings.max_file_size == 200_000_000
    assert settings.data == tmp_path / "share" / "batchwright"


def test_the_file_is_found_by_variable_and_in_the_folder_for_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "config" / "batchwright"
    folder.mkdir(parents=True)
    (folder / "batchwright.toml").write_text("port = 1")
    assert load_settings().port == 1
    monkeypatch.setenv("BATCHWRIGHT_CONFIG", str(_file(tmp_path, "port = 2")))
    assert load_settings().port == 2


def test_lists_and_sizes_have_a_form_in_each_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _file(tmp_path, 'webhook_allow = ["a.internal", "10.0.0.0/8"]\nmax_line_size = "2MiB"')
    settings = load_settings(config=path)
    assert settings.webhook_allow == ("a.internal", "10.0.0.0/8")
    assert settings.max_line_size == 2 * 2**20
    monkeypatch.setenv("BATCHWRIGHT_WEBHOOK_ALLOW", "b.internal, 10.1.0.0/16")
    assert load_settings(config=path).webhook_allow == ("b.internal", "10.1.0.0/16")
    assert load_settings({"webhook_allow": "c"}, config=path).webhook_allow == ("c",)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max_line = 3", "there is no setting 'max_line'; did you mean max_lines?"),
        ("max-lines = 3", "there is no setting 'max-lines'; did you mean max_lines?"),
        ("zzz = 3", "there is no setting 'zzz'; the names are: host, port"),
        ("port = ", "Invalid value"),
        ("port = 70000", "port=70000: Input should be less than or equal to 65535"),
    ],
)
def test_what_is_wrong_in_the_file_is_told_by_name(tmp_path: Path, text: str, told: str) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(InputError) as caught:
        load_settings(config=path)
    assert str(path) in str(caught.value)
    assert told in str(caught.value)


def test_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        load_settings(config=tmp_path / "none.toml")


def test_an_error_names_the_flag_or_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"--max-lines='few': Input should be a valid integer"):
        load_settings({"max_lines": "few"})
    monkeypatch.setenv("BATCHWRIGHT_BACKEND", "nowhere")
    with pytest.raises(InputError, match=r"BATCHWRIGHT_BACKEND='nowhere': must be the http:// .* or \"engine\""):
        load_settings()


def test_the_precision_of_the_engine() -> None:
    config = load_settings({"quantization": "int8", "deterministic": "true"}).engine
    assert (config.quantization, config.deterministic) == ("int8", True)
    assert load_settings().engine == EngineConfig()
    with pytest.raises(InputError, match=r"quantization='int8' with tensor_parallel=2: .*leave one out"):
        load_settings({"quantization": "int8", "tensor_parallel": "2"})
    with pytest.raises(InputError, match=r"--quantization='int3': Input should be 'int8', 'int8-group', .*'fp8'"):
        load_settings({"quantization": "int3"})


def test_secrets_are_not_in_errors_nor_in_what_is_printed() -> None:
    with pytest.raises(InputError) as caught:
        load_settings({"database": " ", "host": " "})
    assert "--database: must not be empty" in str(caught.value)
    assert "s3cret" not in repr(Settings(backend_api_key="s3cret"))  # type: ignore[arg-type]


def test_every_setting_but_a_key_is_a_flag_in_the_help() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "batchwright", "serve", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "200", "TERM": "dumb"},
    ).stdout
    for name, field in setting_fields().items():
        assert (f"--{name.replace('_', '-')} " in shown.replace("/", " ")) == has_flag(field), name
    assert [name for name, field in setting_fields().items() if not has_flag(field)] == ["backend_api_key"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"cors_origins": "chat.example.com"}, "is no origin"),
        ({"cors_origins": ["https://chat.example.com/"]}, "is no origin"),
        ({"cors_origins": ["null"]}, "is no origin"),
        ({"model_alias": "a"}, "write NAME=MODEL"),
        ({"model_alias": ["a=b", "a=c"]}, "given twice"),
        ({"max_body_memory": 1000}, "must be at least max_body_size"),
        ({"max_online_body_size": "1GiB"}, "must be at least max_online_body_size"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        Settings.model_validate(given)


def test_lists_are_read_from_texts() -> None:
    settings = Settings.model_validate({"cors_origins": "https://A.example, *", "model_alias": "a=org/m, b = org/m"})
    assert settings.cors_origins == ("https://a.example", "*")
    assert settings.aliases == {"a": "org/m", "b": "org/m"}


def test_a_flag_of_a_list_may_be_repeated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from batchwright.cli.main import app
    from batchwright.server import process

    served: list[Settings] = []
    monkeypatch.setattr(process, "serve", served.append)
    for flags in (["--classifier", "./a", "--classifier", "./b"], ["--classifier", "./a, ./b"], []):
        result = CliRunner().invoke(app, ["serve", "--data", str(tmp_path), *flags])
        assert result.exit_code == 0, result.output
    assert [settings.classifier for settings in served] == [("./a", "./b"), ("./a", "./b"), ()]
