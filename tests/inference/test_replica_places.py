"""Groups of cores: of machines that are described by files like those in /sys."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.cpu_cores import Core, core_groups, cores_of
from batchwright.errors import InputError
from batchwright.inference.replicas import cores
from batchwright.inference.replicas.cores import parse_count, places_for


def machine(folder: Path, nodes: int, cores: int, threads: int) -> Path:
    """Logical processors as Linux numbers them: the second thread of each core after the first of all."""
    total = nodes * cores
    for core in range(total):
        cpus = [core + thread * total for thread in range(threads)]
        for cpu in cpus:
            (folder / f"cpu{cpu}/topology").mkdir(parents=True)
            (folder / f"cpu{cpu}/node{core // cores}").mkdir()
            (folder / f"cpu{cpu}/topology/thread_siblings_list").write_text(",".join(map(str, cpus)) + "\n")
    return folder


def test_threads_of_a_core_stay_together_and_groups_within_nodes(tmp_path: Path) -> None:
    cores = cores_of(range(32), machine(tmp_path, nodes=2, cores=8, threads=2))
    assert cores[0] == Core(0, (0, 16))
    assert [len(group) for group in core_groups(cores, 4)] == [4, 4, 4, 4]
    assert [{core.node for core in group} for group in core_groups(cores, 4)] == [{0}, {0}, {1}, {1}]
    assert [{core.node for core in group} for group in core_groups(cores, 3)] == [{0}, {0}, {1}]
    assert [len(group) for group in core_groups(cores, 1)] == [16]


def test_only_processors_that_may_be_used_are(tmp_path: Path) -> None:
    folder = machine(tmp_path, nodes=2, cores=4, threads=2)
    assert cores_of({1, 9, 2}, folder) == [Core(0, (1, 9)), Core(0, (2,))]
    assert cores_of({3, 4}, tmp_path / "none") == [Core(0, (3,)), Core(0, (4,))]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 24))
def test_every_core_is_in_one_group(sizes: list[int], number: int) -> None:
    cores = [Core(node, (100 * node + index,)) for node, size in enumerate(sizes) for index in range(size)]
    if number > len(cores):
        with pytest.raises(InputError, match="core of its own"):
            core_groups(cores, number)
        return
    groups = core_groups(cores, number)
    assert len(groups) == number
    assert sorted((core for group in groups for core in group), key=lambda core: core.cpus) == cores
    assert all(groups)
    if number >= len(sizes):
        assert all(len({core.node for core in group}) == 1 for group in groups)


def test_numbers_of_replicas() -> None:
    assert [parse_count(each) for each in ("2", 3, "auto")] == [2, 3, "auto"]
    for wrong in ("0", "-1", "many", "", True):
        with pytest.raises(ValueError, match="replicas="):
            parse_count(wrong)
    assert len(places_for("auto", "cpu")) >= 1
    with pytest.raises(InputError, match="core of its own"):
        places_for(100_000, "cpu")
    with pytest.raises(InputError, match="cuda:1"):
        places_for(2, "cuda:1")


def test_replicas_of_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "visible_gpus", lambda: ["0", "1", "4", "5", "6"])
    assert [place.gpu for place in places_for("auto", "auto")] == ["0", "1", "4", "5", "6"]
    assert [place.gpu for place in places_for("auto", "auto", 2)] == ["0,1", "4,5"]
    assert [place.gpu for place in places_for(1, "cuda", 4)] == ["0,1,4,5"]
    with pytest.raises(InputError, match="replicas=2: each needs tensor_parallel=4 GPUs of its own, and 5 can be used"):
        places_for(2, "auto", 4)
