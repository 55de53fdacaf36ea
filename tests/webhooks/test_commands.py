"""`batchwright keys` and `batchwright webhooks`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.webhooks.outbox import end_batch
from typer.testing import CliRunner, Result

from batchwright.cli import keys, webhooks
from batchwright.errors import InputError, InvalidRequest, NotFound
from batchwright.jobs.service.keys import ApiKeys
from batchwright.jobs.store import open_store
from batchwright.jobs.webhooks.signing import secret_bytes

APPS = {"keys": keys.app, "webhooks": webhooks.app}
URL = "https://93.184.216.34/hook"


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    for name in ("BATCHWRIGHT_DATA", "BATCHWRIGHT_DATABASE", "BATCHWRIGHT_WEBHOOK_ALLOW", "BATCHWRIGHT_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def run(command: str, *arguments: str | Path) -> Result:
    result = CliRunner().invoke(APPS[command], [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def rows(result: Result) -> list[list[str]]:
    return [line.split() for line in result.stdout.splitlines()[1:]]


def test_a_key_is_shown_once(tmp_path: Path) -> None:
    data = tmp_path / "data"
    made = run("keys", "create", "ci", "--tenant", "team-a", "--data", data)
    key = made.stdout.strip()
    assert key.startswith("bw-")
    [[key_id, name, tenant, shown, *_]] = rows(run("keys", "list", "--data", data))
    assert (name, tenant, shown) == ("ci", "team-a", f"{key[:10]}…")
    assert key_id in made.stderr
    assert rows(run("keys", "list", "--tenant", "other", "--data", data)) == []

    async def known() -> bool:
        async with open_store(data / "batchwright.db") as store:
            return await ApiKeys(store).recognize(key) is not None

    assert asyncio.run(known())
    assert "5 s" in run("keys", "revoke", key_id, "--data", data).stderr
    assert not asyncio.run(known())
    assert " revoked " in run("keys", "list", "--data", data).stdout


def test_the_folder_is_made_for_its_owner_only(tmp_path: Path) -> None:
    run("keys", "create", "ci", "--data", tmp_path / "new" / "data")
    assert (tmp_path / "new" / "data").stat().st_mode & 0o777 == 0o700


def test_the_store_is_the_one_of_the_environment_or_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("keys", "create", "one")
    assert (tmp_path / "home" / "batchwright" / "batchwright.db").exists()
    monkeypatch.setenv("BATCHWRIGHT_DATABASE", str(tmp_path / "named.db"))
    run("keys", "create", "two")
    assert [row[1] for row in rows(run("keys", "list", "--database", tmp_path / "named.db"))] == ["two"]


def test_a_store_is_not_made_by_looking_for_one(tmp_path: Path) -> None:
    data, database = tmp_path / "data", tmp_path / "mistyped.db"
    for command in (("keys", "list"), ("keys", "revoke", "key_1"), ("webhooks", "list"), ("webhooks", "secret")):
        with pytest.raises(InputError, match=f"there is no store at {data / 'batchwright.db'}: see to --data"):
            run(*command, "--data", data)
        with pytest.raises(InputError, match=f"there is no store at {database}: "):
            run(*command, "--database", database)
    assert not data.exists()
    assert not database.exists()
    assert f"made a new store at {database}" in run("keys", "create", "ci", "--database", database).stderr
    assert "new store" not in run("keys", "create", "ci", "--database", database).stderr


def test_the_store_may_be_named_by_a_settings_file(tmp_path: Path) -> None:
    config = tmp_path / "named.toml"
    config.write_text(f'data = "{tmp_path / "data"}"\nwebhook_allow = ["10.0.0.0/8"]\n')
    run("keys", "create", "ci", "--config", config)
    run("webhooks", "create", "http://10.1.2.3/hook", "--config", config)
    assert [row[1] for row in rows(run("keys", "list", "--data", tmp_path / "data"))] == ["ci"]
    assert [row[1] for row in rows(run("webhooks", "list", "--config", config))] == ["http://10.1.2.3/hook"]


def test_what_does_not_exist_is_said(tmp_path: Path) -> None:
    run("keys", "create", "ci", "--data", tmp_path)
    for command in (("keys", "revoke"), ("webhooks", "rotate"), ("webhooks", "delete"), ("webhooks", "disable")):
        with pytest.raises(NotFound, match="'x_1' does not exist"):
            run(*command, "x_1", "--data", tmp_path)


def test_the_life_of_a_webhook(tmp_path: Path) -> None:
    at = ("--data", tmp_path)
    secret = run("webhooks", "create", URL, *at).stdout.strip()
    assert len(secret_bytes(secret)) == 32
    [[webhook_id, url, *_]] = rows(run("webhooks", "list", *at))
    assert url == URL
    assert rows(run("webhooks", "list", "--tenant", "other", *at)) == []
    rotated = run("webhooks", "rotate", webhook_id, *at).stdout.strip()
    assert rotated != secret
    run("webhooks", "disable", webhook_id, *at)
    assert len(rows(run("webhooks", "list", *at))[0]) == 6
    run("webhooks", "enable", webhook_id, *at)
    assert len(rows(run("webhooks", "list", *at))[0]) == 4
    callback = run("webhooks", "secret", *at).stdout
    assert callback == run("webhooks", "secret", *at).stdout
    assert callback.strip() not in (secret, rotated)
    newer = run("webhooks", "secret", "--rotate", *at).stdout
    assert newer != callback
    assert newer == run("webhooks", "secret", *at).stdout

    async def end() -> None:
        async with open_store(tmp_path / "batchwright.db") as store:
            await end_batch(store, await store.register_worker("test", 60), "1")

    asyncio.run(end())
    run("webhooks", "delete", webhook_id, *at)
    assert rows(run("webhooks", "list", *at)) == []
    [failed] = rows(run("webhooks", "failed", *at))
    assert failed[1:4] == ["batch.failed", "batch_1", URL]
    assert " ".join(failed[-4:]) == "the webhook was deleted"


def test_a_webhook_that_leads_inside_needs_the_allow_list(tmp_path: Path) -> None:
    inside = "http://10.1.2.3:9000/hook"
    with pytest.raises(InvalidRequest, match=r"10.1.2.3 is not a global address \(private\); .* webhook_allow"):
        run("webhooks", "create", inside, "--data", tmp_path)
    run("webhooks", "create", inside, "--webhook-allow", "10.1.0.0/16", "--data", tmp_path)
    [[_, url, *_]] = rows(run("webhooks", "list", "--data", tmp_path))
    assert url == inside
