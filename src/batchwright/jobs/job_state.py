"""The state file of a job: the identity of the job that owns an output, and the lock on it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchwright.errors import InputError, ResumeRefused

_FORM = 1


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """Everything that the results of a job depend on. Runs with equal identities belong to one job."""

    input_sha256: str
    input_name: str
    """Name of the input, for messages only: the same content under another name is the same input."""
    parameters: Mapping[str, Any]
    """JSON values by name, sampling defaults included."""
    model_files: str | None = None
    """Fingerprint that tells the model from another one of the same name or path; None if there is none."""

    @property
    def key(self) -> str:
        """Eight hexadecimal digits that distinguish the job from others."""
        text = json.dumps([self.input_sha256, self.parameters], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def changes(self, saved: JobIdentity) -> list[str]:
        """Descriptions of the differences from `saved`."""
        found = []
        if self.input_sha256 != saved.input_sha256:
            found.append(f"the content of the input (then {saved.input_name}, now {self.input_name})")
        for name in sorted({*self.parameters, *saved.parameters}):
            now, then = self.parameters.get(name), saved.parameters.get(name)
            if now != then:
                found.append(f"{name} (then {json.dumps(then)}, now {json.dumps(now)})")
        if None not in (self.model_files, saved.model_files) and self.model_files != saved.model_files:
            found.append("the files of the model")
        return found


class StateFile:
    """`OUTPUT.batchwright.json`: the identity of the job, and the lock that lets one run at a time write OUTPUT.

    The lock is released when the process ends, however it ends. The file stays when the job is complete, so that the
    same command finds nothing left to do.
    """

    def __init__(self, path: Path) -> None:
        """Takes the lock. Raises `ResumeRefused` if another run holds it, `InputError` if it cannot be written."""
        self.path = path
        self._descriptor = self._locked()

    def _locked(self) -> int:
        while True:
            try:
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                raise InputError(f"{self.path} cannot be written: {error.strerror}") from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                raise ResumeRefused(
                    f"another run is writing this output (it holds {self.path}): wait for it, or end it"
                ) from error
            # The run before may have removed the file after we opened it: then our lock is worth nothing.
            if self.path.exists() and self.path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
            os.close(descriptor)

    def read(self) -> JobIdentity | None:
        """The identity that was saved; None if there is none, or only part of one."""
        try:
            content = json.loads(os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0))
            if content["form"] != _FORM:
                raise ResumeRefused(
                    f"{self.path} was written by another version of batchwright: finish the job with that, "
                    "or start over with --overwrite"
                )
            name, sha256 = content["input"]["name"], content["input"]["sha256"]
            return JobIdentity(sha256, name, content["parameters"], content.get("model_files"))
        except (ValueError, KeyError, TypeError):
            return None

    def write(self, identity: JobIdentity) -> None:
        """Save `identity`, durably. Raises OSError."""
        content = {
            "form": _FORM,
            "job": identity.key,
            "input": {"name": identity.input_name, "sha256": identity.input_sha256},
            "parameters": identity.parameters,
            "model_files": identity.model_files,
        }
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(content, indent=2).encode() + b"\n", 0)
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Release the lock, and remove the file if nothing was saved in it."""
        if not os.fstat(self._descriptor).st_size:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
