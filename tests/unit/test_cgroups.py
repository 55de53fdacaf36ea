"""Limits of control groups, in made-up folders of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright import cgroups
from batchwright.cgroups import cpu_quota, memory_left

GIB = 2**30


class Groups:
    """A table of groups and the folders that are mounted."""

    def __init__(self, folder: Path, table: str) -> None:
        self.table = folder / "table"
        self.mount = folder / "cgroup"
        self.table.write_text(table)

    def write(self, group: str, **files: object) -> None:
        folder = self.mount / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name.replace("__", ".")).write_text(f"{content}\n")

    @property
    def memory(self) -> int | None:
        return memory_left(self.table, self.mount)

    @property
    def cpus(self) -> float | None:
        return cpu_quota(self.table, self.mount)


def test_a_container_of_version_2(tmp_path: Path) -> None:
    """`docker run --memory 4g --cpus 2`, with a namespace of groups of its own."""
    groups = Groups(tmp_path, "0::/\n")
    stat = "anon 1\ninactive_file 1073741824\nactive_file 0\nslab 5"
    groups.write("", cgroup__controllers="cpu memory", cpu__max="200000 100000")
    groups.write("", memory__max=4 * GIB, memory__current=2 * GIB, memory__stat=stat)
    assert (groups.memory, groups.cpus) == (3 * GIB, 2.0)


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    groups = Groups(tmp_path, "0::/kube/pod/one\n")
    groups.write("", cgroup__controllers="cpu memory")
    groups.write("kube", memory__max="max", cpu__max="max 100000")
    groups.write("kube/pod", memory__max=2 * GIB, memory__current=GIB, cpu__max="150000 100000")
    groups.write("kube/pod/one", memory__max=8 * GIB, memory__current=GIB // 2, cpu__max="400000 100000")
    assert (groups.memory, groups.cpus) == (GIB, 1.5)


def test_a_container_of_version_1(tmp_path: Path) -> None:
    """The table names paths of the machine, and what is mounted is the container's own folder."""
    groups = Groups(tmp_path, "12:memory:/docker/4f\n4:cpu,cpuacct:/docker/4f\n1:name=systemd:/docker/4f\n")
    stat = "inactive_file 7\ntotal_inactive_file 1024\ntotal_active_file 1024"
    groups.write("memory", memory__limit_in_bytes=GIB, memory__usage_in_bytes=GIB // 2, memory__stat=stat)
    groups.write("cpu,cpuacct", cpu__cfs_quota_us=50_000, cpu__cfs_period_us=100_000)
    assert (groups.memory, groups.cpus) == (GIB // 2 + 2048, 0.5)


def test_version_1_without_limits_beside_version_2(tmp_path: Path) -> None:
    groups = Groups(tmp_path, "4:memory:/a\n1:cpu:/\n0::/\n")
    groups.write("memory/a", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=GIB)
    groups.write("cpu", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100_000)
    assert (groups.memory, groups.cpus) == (None, None)
    groups.write("unified", cgroup__controllers="memory", memory__max=GIB)
    assert (groups.memory, groups.cpus) == (GIB, None)


def test_nothing_is_known_of_a_machine_without_groups(tmp_path: Path) -> None:
    assert memory_left(tmp_path / "none", tmp_path) is None
    assert cpu_quota(tmp_path / "none", tmp_path) is None


def test_more_than_the_limit_leaves_nothing(tmp_path: Path) -> None:
    groups = Groups(tmp_path, "0::/\n")
    groups.write("", cgroup__controllers="", memory__max=GIB, memory__current=2 * GIB)
    assert groups.memory == 0


@given(table=st.text(max_size=60), content=st.text(max_size=20))
def test_whatever_files_contain_is_read(table: str, content: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("groups")
    groups = Groups(folder, "0::/\n" + table.replace("\r", ""))
    groups.write("", cgroup__controllers="", memory__max=content, memory__stat=content, cpu__max=content)
    assert groups.memory is None or groups.memory >= 0
    assert groups.cpus is None or groups.cpus >= 0


def test_what_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    for quota, alone, one_of_three in ((None, 8, 8), (0.5, 1, 1), (1.9, 1, 1), (7.0, 7, 2), (100.0, 8, 8)):
        monkeypatch.setattr(cgroups, "cpu_quota", lambda quota=quota: quota)
        assert (cgroups.threads_for(8), cgroups.threads_for(8, sharing=3)) == (alone, one_of_three)
    monkeypatch.setattr(cgroups, "memory_left", lambda: 4096)
    assert cgroups.free_memory() == 4096
    monkeypatch.setattr(cgroups, "memory_left", lambda: None)
    assert cgroups.free_memory() > 4096
