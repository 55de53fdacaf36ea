"""Processes of workers: which of them have certainly ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchwright.service.worker.processes import has_ended, this_process

pytestmark = pytest.mark.skipif(this_process() is None, reason="this system does not tell when a process began")

_CHILD = "from batchwright.service.worker.processes import this_process; print(this_process(), flush=True); input()"


def test_one_that_is_killed_has_ended() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        process = child.stdout.readline().strip()
        assert not has_ended(process)
        child.kill()
        child.wait()
        assert has_ended(process)


def test_one_whose_id_another_has_now_has_ended() -> None:
    process = this_process()
    assert process is not None
    assert not has_ended(process)
    assert has_ended(process.rpartition("/")[0] + "/0")


def test_of_one_elsewhere_nothing_is_said(tmp_path: Path) -> None:
    process = this_process()
    assert process is not None
    place, pid, _ = process.rsplit("/", 2)
    assert not has_ended(f"another{place}/{pid}/0")
    assert not has_ended(f"another{place}/4194305/0")
    # Where the system does not tell, neither of itself nor of others.
    assert this_process(tmp_path) is None
    assert not has_ended(process, tmp_path)


def test_a_proc_of_another_namespace_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "self").symlink_to(str(os.getpid() + 1))
    assert this_process(tmp_path) is None
