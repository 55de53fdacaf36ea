"""What is in `deploy/`: its manifests, the services of its compose files, and the commands of both."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from subprocess import list2cmdline
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE_FILES = sorted(DEPLOY.glob("compose*.yaml"))
PROGRAM = "batchwright"


def manifests(name: str) -> list[dict[str, Any]]:
    """The documents of a file in `deploy/kubernetes/`."""
    return [*yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text(encoding="utf-8"))]


def manifest(name: str, kind: str) -> dict[str, Any]:
    [found] = [document for document in manifests(name) if document["kind"] == kind]
    return found


def schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(__file__).parent / f"{name}.schema.json").read_text(encoding="utf-8"))
    return found


def compose(file: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    """A compose file with the values of its variables in it."""

    def value(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        return variables[name] if default is None else variables.get(name, default)

    text = re.sub(r"\$\{(?P<name>\w+)(?::-(?P<default>[^}]*)|:\?[^}]*)?\}", value, file.read_text(encoding="utf-8"))
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def entrypoint(job: dict[str, Any]) -> list[str]:
    """The arguments of a RayJob's entry point after both shells: that of the submitter, and that of the Ray job."""
    return shlex.split(list2cmdline(shlex.split(job["spec"]["entrypoint"])))


def commands() -> Iterator[tuple[str, list[str]]]:
    """All commands of batchwright in manifests and compose files, each with where it stands."""
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        for document in manifests(path.name):
            spec = document.get("spec", {})
            for container in spec.get("template", {}).get("spec", {}).get("containers", []):
                yield f"{path.name}: {container['name']}", container["args"]
            if document["kind"] == "RayJob":
                program, *arguments = entrypoint(document)
                assert program == PROGRAM
                yield f"{path.name}: entrypoint", arguments
    for path in COMPOSE_FILES:
        for name, service in compose(path, {"POSTGRES_PASSWORD": "x", "S3_SECRET_KEY": "x"})["services"].items():
            if "build" in service and "entrypoint" not in service:
                yield f"{path.name}: {name}", service.get("command", ["serve"])
    for path in sorted(DEPLOY.rglob("*.yaml")):
        # Those that the comments at the top tell the reader to run.
        for words in re.findall(r"^#.* (?:run --rm \w+|--) ((?:run|show|jobs|keys|serve) .*)$", path.read_text(), re.M):
            yield f"{path.name}: {words}", shlex.split(words)
