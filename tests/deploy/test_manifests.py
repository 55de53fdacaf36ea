"""Manifests and compose files against the schemas of what reads them; commands in them against our own flags.

Nothing here talks to a cluster. The schemas refuse unknown fields, as a cluster does. What schemas cannot say, which a
cluster would refuse or do otherwise than is meant, is stated as a test by itself.
"""

from __future__ import annotations

import itertools
import json
import re
import signal
import tomllib
from pathlib import Path
from typing import Any, NoReturn

import jsonschema_rs
import pytest
import typer

from batchwright.cli.main import BAD_USAGE, app
from batchwright.errors import InputError
from batchwright.service import setting_sources
from batchwright.service.setting_sources import load_settings
from batchwright.service.settings import Settings

from .files import COMPOSE_FILES, DEPLOY, ROOT, commands, compose, entrypoint, manifest, manifests, schema

NAMES = sorted(path.name for path in (DEPLOY / "kubernetes").glob("*.yaml"))
OLDEST, NEWEST = "1.33", "1.37"
"""Versions of Kubernetes: the first with all fields that are used switched on, and the newest with a schema here."""
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The templates of pods in a manifest."""
    spec = document.get("spec", {})
    if document["kind"] == "RayJob":
        cluster = spec["rayClusterSpec"]
        return [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]
    return [spec["template"]] if "template" in spec else []


ALL_PODS = [
    pytest.param(pod, id=f"{name} {n}") for name in NAMES for d in manifests(name) for n, pod in enumerate(pods(d))
]


def check(document: dict[str, Any], version: str) -> None:
    """Raises `ValueError` for what Kubernetes, or KubeRay, would refuse."""
    kubernetes = pytest.importorskip("kubernetes_validate")
    if document["kind"] == "RayJob":
        errors = [*jsonschema_rs.validator_for(schema("rayjob")).iter_errors(document)]
        if errors:
            raise ValueError(errors[0].message)
        for template in pods(document):
            check({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}, version)
        return
    try:
        kubernetes.validate(document, version, strict=True)
    except kubernetes.ValidationError as error:
        raise ValueError(error.message) from error


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("name", NAMES)
def test_manifests_are_those_of_kubernetes(name: str, version: str) -> None:
    for document in manifests(name):
        check(document, version)


@pytest.mark.parametrize(
    ("kind", "at", "value"),
    [
        ("Job", ["backoffLimitPerIndices"], 6),
        ("Job", ["parallelism"], "two"),
        ("Job", ["template", "spec", "terminationGracePeriod"], 90),
        ("Job", ["podFailurePolicy", "rules"], [{"onExitCodes": {"operator": "In", "values": [2]}}]),
        ("RayJob", ["shutdownAfterJobFinish"], True),
        ("RayJob", ["rayClusterSpec", "headGroupSpec", "rayStartParams", "num-cpus"], 0),
        ("RayJob", ["rayClusterSpec", "headGroupSpec", "template", "spec", "containers"], [{"image": "x"}]),
    ],
)
def test_a_mistake_in_a_manifest_is_found(kind: str, at: list[str], value: object) -> None:
    document = manifest("workers.yaml" if kind == "Job" else "rayjob.yaml", kind)
    field = document["spec"]
    for name in at[:-1]:
        field = field[name]
    field[at[-1]] = value
    with pytest.raises(ValueError, match=r"."):
        check(document, NEWEST)


@pytest.mark.parametrize("path", COMPOSE_FILES, ids=lambda path: path.name)
def test_compose_files_are_those_of_the_specification(path: Any) -> None:
    found = compose(path, {"POSTGRES_PASSWORD": "x", "S3_SECRET_KEY": "x"})
    validator = jsonschema_rs.validator_for(schema("compose"))
    assert [each.message for each in validator.iter_errors(found)] == []
    found["services"]["postgres"]["volume"] = []
    assert not validator.is_valid(found)


def test_the_comments_of_a_compose_file_name_its_services() -> None:
    for path in COMPOSE_FILES:
        services = compose(path, {"POSTGRES_PASSWORD": "x", "S3_SECRET_KEY": "x"})["services"]
        named = re.findall(r"^#.* (?:run --rm|up -d) (\w+)", path.read_text(encoding="utf-8"), re.M)
        assert named
        assert {*named} <= {*services}


class _Parsed(Exception):
    """Raised in place of what a command would do."""


def parse(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The values of a command line by the names of its flags. Nothing is run; bad usage raises an error or exits."""
    if arguments[0] == "serve" or arguments[:2] == ["jobs", "work"]:
        found: dict[str, Any] = {}

        def load(given: dict[str, Any], *, config: Path | None) -> NoReturn:
            found.update(load_settings(given, config=config))
            raise _Parsed

        monkeypatch.setattr(setting_sources, "load_settings", load)
        with pytest.raises(_Parsed):
            app(arguments)
        return found
    command: Any = typer.main.get_command(app)
    context, words = None, arguments
    while hasattr(command, "resolve_command"):
        context = command.make_context(command.name, [*words], parent=context)
        _, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
    values: dict[str, Any] = command.make_context(command.name, [*words], parent=context).params
    return values


@pytest.mark.parametrize("arguments", [pytest.param(words, id=where) for where, words in commands()])
def test_commands_have_only_flags_that_exist(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parse(arguments, monkeypatch)


@pytest.mark.parametrize("line", ["jobs work --until-idel", "serve --kv-memory much", "run a.jsonl -o b --replica 2"])
def test_a_flag_that_is_wrong_is_found(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((SystemExit, Exception)) as caught:
        parse(line.split(), monkeypatch)
    status = getattr(caught.value, "code", None) or getattr(caught.value, "exit_code", None)  # of Typer's own errors
    assert status == BAD_USAGE or isinstance(caught.value, InputError)


@pytest.mark.parametrize("template", ALL_PODS)
def test_pods_run_as_the_user_of_the_image_and_may_little(template: dict[str, Any]) -> None:
    [user, group] = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.M)[0]
    assert f"--gid {group} " in DOCKERFILE
    assert f"--uid {user} " in DOCKERFILE
    spec = template["spec"]
    context = spec["securityContext"]
    assert context["runAsNonRoot"] is True
    assert [context[name] for name in ("runAsUser", "runAsGroup", "fsGroup")] == [int(user), int(group), int(group)]
    assert spec["automountServiceAccountToken"] is False
    volumes = {volume["name"] for volume in spec["volumes"]}
    for container in spec["containers"]:
        own = container["securityContext"]
        assert (own["allowPrivilegeEscalation"], own["capabilities"]) == (False, {"drop": ["ALL"]})
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.keys() == volumes
        # What the image keeps is in a volume that the user may write to.
        assert {"/tmp", *re.findall(r"^VOLUME (.*)$", DOCKERFILE, re.M)} == {*mounts.values()}
        assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]


def test_names_in_the_manifests_belong_together() -> None:
    service, workers = manifest("service.yaml", "Deployment"), manifest("workers.yaml", "Job")
    claim = manifest("service.yaml", "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for document in (service, workers):
        spec = document["spec"]["template"]["spec"]
        claims = [each["persistentVolumeClaim"]["claimName"] for each in spec["volumes"] if "emptyDir" not in each]
        assert claims == [claim["metadata"]["name"]]
        [container] = spec["containers"]
        names = {each["name"]: each.get("valueFrom", {}) for each in container["env"]}
        assert names["BATCHWRIGHT_DATABASE"] == {"secretKeyRef": {"name": "batchwright", "key": "database"}}
        assert names["OMP_NUM_THREADS"] == {"resourceFieldRef": {"resource": "requests.cpu"}}
    labels = service["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"]["matchLabels"] == labels
    assert manifest("service.yaml", "Service")["spec"]["selector"] == labels
    assert workers["spec"]["template"]["metadata"]["labels"] != labels
    texts = [(DEPLOY / "kubernetes" / name).read_text(encoding="utf-8") for name in NAMES]
    images = {image for text in texts for image in re.findall(r"image: (.*)", text)}
    assert len(images) == 1


def test_the_job_of_workers_ends_and_counts_what_failed() -> None:
    spec = manifest("workers.yaml", "Job")["spec"]
    template = spec["template"]["spec"]
    assert "--until-idle" in template["containers"][0]["args"]
    # What a cluster refuses: a policy, or a limit for each index, without these.
    assert (template["restartPolicy"], spec["completionMode"]) == ("Never", "Indexed")
    assert spec["completions"] == spec["parallelism"]
    assert "backoffLimit" not in spec  # it has no limit where there is one for each index
    actions = {}
    for rule in spec["podFailurePolicy"]["rules"]:
        assert ("onExitCodes" in rule) != ("onPodConditions" in rule)
        for code in rule.get("onExitCodes", {}).get("values", []):
            assert rule["onExitCodes"]["containerName"] == template["containers"][0]["name"]
            actions[code] = rule["action"]
    assert actions == {BAD_USAGE: "FailJob", 128 + signal.SIGTERM: "Ignore"}


@pytest.mark.parametrize("name", ["service.yaml", "workers.yaml"])
def test_pods_are_given_the_time_to_drain(name: str) -> None:
    [template] = [template for document in manifests(name) for template in pods(document)]
    # Lines may take the grace, and so may committing them.
    assert template["spec"]["terminationGracePeriodSeconds"] > 2 * Settings().drain_grace


def test_the_replicas_of_the_ray_job_find_room_on_its_workers() -> None:
    job = manifest("rayjob.yaml", "RayJob")
    words = entrypoint(job)
    flags = dict(itertools.pairwise(words))
    wanted = json.loads(flags["--resources"])
    head, [group] = job["spec"]["rayClusterSpec"]["headGroupSpec"], job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    [container] = group["template"]["spec"]["containers"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(flags["--replicas"]) * wanted["num_gpus"] <= group["replicas"] * gpus
    assert flags["--ray"] == "auto"
    assert words[2].startswith("s3://")
    assert flags["-o"].startswith("s3://")


def test_the_extras_that_images_are_built_with_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    files = [DEPLOY / "Dockerfile", *DEPLOY.rglob("*.yaml")]
    texts = "".join(path.read_text(encoding="utf-8") for path in files)
    named = {extra for match in re.findall(r"\bEXTRAS(?:=|: )([\w,]+)", texts) for extra in match.split(",")}
    assert {"engine", "postgres", "server"} <= named
    assert named <= {*project["optional-dependencies"]}
