"""Where the API key for an endpoint comes from, and that no message repeats one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchwright.errors import InputError
from batchwright.inference.endpoint_keys import OWN_VARIABLE, PROVIDERS, EndpointKey, find_key, key_variables
from batchwright.wire.dialects import ANTHROPIC, OPENAI, Dialect, dialect_for

OPENAI_URL, ANTHROPIC_URL = "https://api.openai.com/v1", "https://api.anthropic.com/v1"
ALL = {
    name: f"key-of-{name}"
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GROQ_API_KEY", "MISTRAL_API_KEY", "AZURE_OPENAI_API_KEY")
}


@pytest.mark.parametrize(
    ("address", "dialect", "variable"),
    [
        (OPENAI_URL, OPENAI, "OPENAI_API_KEY"),
        ("https://eu.api.openai.com/v1", OPENAI, "OPENAI_API_KEY"),
        (ANTHROPIC_URL, ANTHROPIC, "ANTHROPIC_API_KEY"),
        (ANTHROPIC_URL, OPENAI, "ANTHROPIC_API_KEY"),
        ("https://API.GROQ.com/openai/v1", OPENAI, "GROQ_API_KEY"),
        ("https://api.mistral.ai/v1", OPENAI, "MISTRAL_API_KEY"),
        ("https://api.together.xyz/v1", OPENAI, "TOGETHER_API_KEY"),
        ("https://api.together.ai/v1", OPENAI, "TOGETHER_API_KEY"),
        ("https://api.fireworks.ai/inference/v1", OPENAI, "FIREWORKS_API_KEY"),
        ("https://openrouter.ai/api/v1", OPENAI, "OPENROUTER_API_KEY"),
        ("https://api.deepseek.com/anthropic/v1", ANTHROPIC, "DEEPSEEK_API_KEY"),
        ("https://api.doubleword.ai/v1", OPENAI, "DOUBLEWORD_API_KEY"),
        ("https://me.openai.azure.com/openai/v1", OPENAI, "AZURE_OPENAI_API_KEY"),
        ("http://127.0.0.1:8000/v1", OPENAI, "OPENAI_API_KEY"),
        ("http://127.0.0.1:8000/v1", ANTHROPIC, "ANTHROPIC_API_KEY"),
        ("https://llm.example.com/v1", OPENAI, "OPENAI_API_KEY"),
        ("https://api.openai.com.example.com/v1", ANTHROPIC, "ANTHROPIC_API_KEY"),
        ("https://notopenrouter.ai/v1", OPENAI, "OPENAI_API_KEY"),
    ],
)
def test_the_variables_of_an_address(address: str, dialect: Dialect, variable: str) -> None:
    assert key_variables(address, dialect) == (OWN_VARIABLE, variable)
    assert find_key(address, dialect, {variable: " k \n", "OTHER": "x"}).value == "k"
    assert find_key(address, dialect, {variable: "k", OWN_VARIABLE: "own"}).value == "own"
    # A key of another provider is never sent.
    assert find_key(address, dialect, {name: key for name, key in ALL.items() if name != variable}).value is None


def test_the_page_names_the_variable_of_every_provider() -> None:
    page = (Path(__file__).parents[2] / "docs" / "endpoints.md").read_text()
    for domain, variable in PROVIDERS.items():
        row = next(line for line in page.splitlines() if line.startswith("|") and f"`{domain}`" in line)
        assert f"`{variable}`" in row


def test_a_variable_that_is_named_is_the_only_one() -> None:
    environment = ALL | {OWN_VARIABLE: "own", "MINE": "mine", "EMPTY": " "}
    assert find_key(OPENAI_URL, OPENAI, environment, variable="MINE") == EndpointKey("mine", "MINE")
    for variable in ("MISSING", "EMPTY"):
        with pytest.raises(InputError, match=f"{variable}: there is no such environment variable"):
            find_key(OPENAI_URL, OPENAI, environment, variable=variable)


@pytest.mark.parametrize("key", ["sk-proj-abc123", "gsk_AbC123", "a b", ""])
def test_a_key_in_place_of_a_name_is_not_repeated(key: str) -> None:
    with pytest.raises(InputError, match="api_key_env") as caught:
        find_key(OPENAI_URL, OPENAI, {}, variable=key)
    assert not key or key not in str(caught.value)


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("  secret \r\nsecond line\n")
    file.chmod(0o600)
    assert find_key(OPENAI_URL, OPENAI, ALL, file=file) == EndpointKey("secret", str(file))
    file.chmod(0o644)
    assert f"chmod 600 {file}" in str(find_key(OPENAI_URL, OPENAI, ALL, file=file).warning)
    file.write_text("\nsecret\n")
    with pytest.raises(InputError, match="its first line is empty"):
        find_key(OPENAI_URL, OPENAI, ALL, file=file)
    file.write_bytes(b"\xff")
    with pytest.raises(InputError, match="not UTF-8"):
        find_key(OPENAI_URL, OPENAI, ALL, file=file)
    with pytest.raises(InputError, match="No such file"):
        find_key(OPENAI_URL, OPENAI, ALL, file=tmp_path / "none")
    with pytest.raises(InputError, match="both name a key"):
        find_key(OPENAI_URL, OPENAI, ALL, file=file, variable="MINE")


def test_a_pipe_is_read_too() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"secret\n")
    os.close(writer)
    key = find_key(OPENAI_URL, OPENAI, {}, file=Path(f"/proc/self/fd/{reader}"))
    os.close(reader)
    assert (key.value, key.warning) == ("secret", None)


def test_what_is_shown_of_a_key() -> None:
    assert "secret" not in repr(EndpointKey("secret", "MINE"))
    assert EndpointKey("secret", "MINE").refusal == "it does not accept the API key from MINE"
    assert EndpointKey("secret").refusal == "it does not accept the API key"
    assert find_key(ANTHROPIC_URL, ANTHROPIC, {}).refusal == (
        "it does not accept requests without an API key; one was looked for in BATCHWRIGHT_BACKEND_API_KEY and "
        "ANTHROPIC_API_KEY"
    )


def test_how_each_dialect_sends_a_key() -> None:
    assert dialect_for(None, OPENAI_URL).headers("k") == {"authorization": "Bearer k"}
    assert dialect_for(None, "https://me.openai.azure.com/openai/v1").headers("k") == {"api-key": "k"}
    assert dialect_for(None, ANTHROPIC_URL).headers("k") == {"x-api-key": "k", "anthropic-version": "2023-06-01"}
    assert dialect_for("anthropic", "http://127.0.0.1/v1").headers(None) == {"anthropic-version": "2023-06-01"}
    assert dialect_for("openai", ANTHROPIC_URL).headers(None) == {}
    with pytest.raises(InputError, match="dialect='gemini': must be one of openai, anthropic"):
        dialect_for("gemini", OPENAI_URL)
