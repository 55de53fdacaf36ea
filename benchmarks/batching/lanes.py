"""Carries out the tasks of a comparison, several at a time."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.batching.findings import Goodput, Load, Measured, Overhead, Real
from benchmarks.batching.overhead import Spent
from benchmarks.batching.peers import Peer, PeerFailed, System
from benchmarks.batching.suite import Study, Task

_LANES = 2


@dataclass(frozen=True, slots=True)
class Done:
    """A task that was carried out, and its result: what was measured, or why nothing was."""

    system: System
    title: str
    measured: Measured | None
    records: list[Goodput | Load | Real | Overhead]
    trouble: str = ""


class Lanes:
    """Threads that each wait for one process at a time; a process is kept for the next task of its system.

    `run` yields the results of the tasks, in their order. If it is closed or interrupted, all processes are ended
    immediately.
    """

    def __init__(self, tasks: Iterable[Task], make_study: Callable[[Peer], Study]) -> None:
        self._tasks = deque(enumerate(tasks))
        self._make_study = make_study
        self._done: queue.Queue[tuple[int, Done | Exception]] = queue.Queue()
        self._peers: set[Peer] = set()
        self._stopped = False

    def __len__(self) -> int:
        """Number of tasks that no thread has taken yet."""
        return len(self._tasks)

    def run(self) -> Generator[Done, None, None]:
        count = len(self._tasks)
        early: dict[int, Done | Exception] = {}
        threads = [threading.Thread(target=self._lane, daemon=True) for _ in range(_LANES)]
        for thread in threads:
            thread.start()
        try:
            for place in range(count):
                while place not in early:
                    early.update([self._done.get()])
                done = early.pop(place)
                if isinstance(done, Exception):
                    raise done
                yield done
        finally:
            self._stopped = True
            for peer in list(self._peers):
                peer.close()
            for thread in threads:
                thread.join()

    def _lane(self) -> None:
        peers: dict[System, Peer] = {}
        while not self._stopped:
            try:
                place, task = self._tasks.popleft()
            except IndexError:
                break
            try:
                self._done.put((place, self._carry_out(task, peers)))
            except Exception as error:
                # Not a system's failure but ours: raise it where it is seen.
                self._done.put((place, error))
        for peer in peers.values():
            self._end(peer)

    def _carry_out(self, task: Task, peers: dict[System, Peer]) -> Done:
        peer = peers.get(task.system)
        try:
            if peer is None:
                peer = peers[task.system] = Peer(task.system)
                self._peers.add(peer)
                if self._stopped:
                    peer.close()
            records = list(task.measure(self._make_study(peer)))
        except PeerFailed as error:
            if peer is not None:
                self._end(peers.pop(task.system))
            return Done(task.system, task.title, None, [], str(error))
        return Done(task.system, task.title, Measured(peer.version, peer.options), [*records])

    def _end(self, peer: Peer) -> None:
        peer.close()
        self._peers.discard(peer)


def overheads(systems: Iterable[System], repeats: int, requests: int) -> Iterator[Done]:
    """Measure the cost of each system, one process at a time, all in turn in each repeat."""
    with ExitStack() as stack:
        peers: list[Peer] = []
        for system in systems:
            try:
                peers.append(stack.enter_context(Peer(system)))
            except PeerFailed as error:
                yield _failed(system, error)
        found: dict[Peer, list[Spent]] = {peer: [] for peer in peers}
        for _ in range(repeats):
            for peer in list(found):
                try:
                    found[peer].append(peer.spend(requests))
                except PeerFailed as error:
                    del found[peer]
                    yield _failed(peer.system, error)
        for peer, spent in found.items():
            yield Done(peer.system, "overhead", Measured(peer.version, peer.options), [_overhead(peer.system, spent)])


def _failed(system: System, error: PeerFailed) -> Done:
    return Done(system, "overhead", None, [], str(error))


def _overhead(system: System, spent: Sequence[Spent]) -> Overhead:
    return Overhead(
        system.name,
        [1e6 * each["cpu"] / each["requests"] for each in spent],
        [1e6 * each["callers"] / each["requests"] for each in spent],
        spent[-1]["mean_size"],
    )
