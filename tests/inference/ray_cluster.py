"""A Ray cluster on this machine, in a process of its own, whose nodes and actors tests kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

_OBJECT_STORE = 100 * 2**20
_QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
"""What has the cluster notice in two seconds that a node is gone, in place of about fifteen."""
_ACTOR = "ray::ReplicaActor"


class RayCluster:
    """A head without CPUs, on which drivers are, and nodes of one CPU each."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self._told()

    def add_node(self) -> None:
        """Add a node."""
        self._tell("add")

    def kill_node(self, number: int) -> None:
        """Kill the node that was added as the `number`-th of those that are there; its actors die with it."""
        self._tell(f"kill {number}")

    def actors(self) -> list[int]:
        """Return the process ids of actors that compute."""
        found = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if any(_ACTOR in part for part in process.cmdline()):
                    found.append(process.pid)
        return found

    def kill_actor(self, number: int) -> bool:
        """Kill one of the actors; false if there is none."""
        actors = self.actors()
        if actors:
            with suppress(ProcessLookupError):
                os.kill(actors[number % len(actors)], signal.SIGKILL)
        return bool(actors)

    def close(self) -> None:
        """End the cluster."""
        with suppress(BrokenPipeError):
            self._tell("end")
        self._process.wait()

    def _tell(self, text: str) -> None:
        assert self._process.stdin is not None
        print(text, file=self._process.stdin, flush=True)
        self._told()

    def _told(self) -> str:
        assert self._process.stdout is not None
        while (line := self._process.stdout.readline()) and not line.startswith("> "):
            pass
        return line[2:].strip()


@contextmanager
def ray_cluster(nodes: int) -> Iterator[RayCluster]:
    """A cluster with so many nodes, for the duration of the block."""
    root = Path(__file__).parents[2]
    # Nodes have the modules of this process, as the nodes of a real cluster have what is installed there.
    paths = os.pathsep.join(map(str, [root / "src", root]))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.inference.ray_cluster", str(nodes)],
        cwd=root,
        env=os.environ | {"PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    cluster = RayCluster(process)
    try:
        yield cluster
    finally:
        cluster.close()


def main() -> None:
    """Obey the commands on standard input."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": _OBJECT_STORE}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "_system_config": _QUICK})
    nodes = []

    def add() -> None:
        nodes.append(cluster.add_node(wait=False, num_cpus=1, object_store_memory=_OBJECT_STORE))

    for _ in range(int(sys.argv[1])):
        add()
    print(">", cluster.address, flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "end":
            break
        if command == "add":
            add()
        else:
            cluster.remove_node(nodes.pop(int(arguments[0])), allow_graceful=False)
        print("> done", flush=True)
    cluster.shutdown()  # type: ignore[no-untyped-call]
    print("> ended", flush=True)


if __name__ == "__main__":
    main()
