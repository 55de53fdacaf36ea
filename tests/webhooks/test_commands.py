"""`batchwright keys`, `batchwright quotas` and `batchwright webhooks`."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from pathlib import Path

import pytest
from tests.webhooks.outbox import end_batch
from typer.testing import CliRunner, Result

from batchwright.cli import keys, quotas, webhooks
from batchwright.errors import InputError, InvalidRequest, NotFound, StoreMismatch
from batchwright.service.access.api_keys import ApiKeys
from batchwright.store import open_store

APPS = {"keys": keys.app, "quotas": quotas.app, "webhooks": webhooks.app}
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
    with pytest.raises(StoreMismatch, match="is that of another one"):
        run("keys", "create", "two")
    monkeypatch.setenv("BATCHWRIGHT_DATA", str(tmp_path / "elsewhere"))
    run("keys", "create", "two")
    assert [row[1] for row in rows(run("keys", "list", "--database", tmp_path / "named.db"))] == ["two"]
    # It has no files, and these may be on another machine.
    assert [*(tmp_path / "elsewhere").glob("files/*")] == []


def test_a_key_that_is_made_first_is_of_the_folder_too(tmp_path: Path) -> None:
    """Or a service with a mistyped `--database` would begin anew there, without it."""
    run("keys", "create", "one", "--data", tmp_path / "data")
    with pytest.raises(StoreMismatch, match="is that of another one"):
        run("keys", "create", "two", "--data", tmp_path / "data", "--database", tmp_path / "data" / "typo.db")
    assert not (tmp_path / "data" / "typo.db").exists()


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
    assert len(base64.b64decode(secret.removeprefix("whsec_"))) == 32
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


def _audited(data: Path) -> list[tuple[str, str]]:
    """Actions and objects of the audit log."""
    [log] = (data / "audit").iterdir()
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert all(event["operator"] and event["host"] and event["outcome"] == "done" for event in events)
    return [(event["action"], event["object"]) for event in events]


def test_a_key_is_changed_and_rotated_and_all_of_it_is_audited(tmp_path: Path) -> None:
    data = tmp_path / "data"
    options = ("--expires", "90d", "--scopes", "online, admin", "--weight", "2.5", "--best-priority", "-3")
    made = run("keys", "create", "ci", *options, "--quota", "storage_bytes=10MB", "--data", data)
    [key_id] = re.findall(r"key_[0-9a-f]{24}", made.stderr)
    shown = run("keys", "list", "--data", data).stdout
    for text in ("valid", "online,admin", "2.5", "-3", "storage_bytes=10000000", "never"):
        assert text in shown
    changes = ("--expires", "2030-01-31", "--name", "other", "--quota", "storage_bytes=none", "--weight", "1")
    run("keys", "update", key_id, *changes, "--data", data)
    shown = run("keys", "list", "--data", data).stdout
    assert "2030-01-31 00:00:00" in shown
    assert "other" in shown
    assert "storage_bytes" not in shown
    run("keys", "update", key_id, "--expires", "never", "--data", data)
    assert "2030-01-31" not in run("keys", "list", "--data", data).stdout
    rotated = run("keys", "rotate", key_id, "--overlap", "1h", "--data", data)
    assert rotated.stdout.strip() != made.stdout.strip()
    assert "valid, old secret until" in run("keys", "list", "--data", data).stdout
    run("keys", "revoke", key_id, "--data", data)
    actions = ("create", "update", "update", "rotate", "revoke")
    assert _audited(data) == [(f"key.{action}", key_id) for action in actions]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--expires", "soon"), "--expires soon: must be a duration such as 90d or 12h, or a date"),
        (("--expires", "2001-01-01"), "must be in the future"),
        (("--scopes", "all"), "scopes: 'all'; give one or more of online"),
        (("--scopes", ""), "scopes: none"),
        (("--weight", "0"), "weight=0: must be 0.01 to 1000"),
        (("--quota", "speed=1"), "quota 'speed=1': must be NAME=VALUE; the names are storage_bytes"),
        (("--quota", "storage_bytes"), "must be NAME=VALUE"),
        (("--quota", "storage_bytes=much"), "storage_bytes=much: must be a size such as 10GB"),
        (("--quota", "enqueued_lines=1.5"), "enqueued_lines=1.5: must be a whole number"),
        (("--quota", "enqueued_lines=0"), "enqueued_lines=0: must be a whole number from 1"),
    ],
)
def test_what_a_key_cannot_be_is_refused(arguments: tuple[str, ...], told: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(told)):
        run("keys", "create", "ci", *arguments, "--data", tmp_path)


def test_quotas_of_a_tenant_are_set_shown_and_removed(tmp_path: Path) -> None:
    run("keys", "create", "ci", "--tenant", "team", "--quota", "tokens_per_minute=5", "--data", tmp_path)
    limits = ("storage_bytes=1GiB", "requests_per_minute=60")
    assert "storage_bytes=1073741824" in run("quotas", "set", *limits, "--tenant", "team", "--data", tmp_path).stderr
    run("quotas", "set", "requests_per_minute=none", "--tenant", "team", "--data", tmp_path)
    shown = run("quotas", "list", "--data", tmp_path).stdout.splitlines()[1:]
    assert shown[0].split() == ["tenant", "team", "storage_bytes", "0", "of", "1,073,741,824"]
    assert shown[1].split()[-2:] == ["tokens_per_minute", "5"]
    assert len(shown) == 2
    run("quotas", "set", "storage_bytes=none", "--tenant", "team", "--data", tmp_path)
    assert len(run("quotas", "list", "--data", tmp_path).stdout.splitlines()) == 2
    run("quotas", "set", "--tenant", "team", "--weight", "2.5", "--data", tmp_path)
    assert run("quotas", "list", "--data", tmp_path).stdout.splitlines()[-1].split() == [
        "tenant",
        "team",
        "weight",
        "2.5",
    ]
    assert [action for action, _ in _audited(tmp_path)][1:] == ["quotas.set"] * 4
    with pytest.raises(InvalidRequest, match="nothing to change"):
        run("quotas", "set", "--tenant", "team", "--data", tmp_path)
    with pytest.raises(InvalidRequest, match=r"^tenant: 'a b' cannot be one"):
        run("quotas", "set", "storage_bytes=1", "--tenant", "a b", "--data", tmp_path)
