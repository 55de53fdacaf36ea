"""Leases of outputs at addresses: one holder at a time, however requests of several interleave."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

fsspec = pytest.importorskip("fsspec")

from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402

from batchwright.clock import ManualClock  # noqa: E402
from batchwright.errors import ResumeRefused  # noqa: E402
from batchwright.jobs.remote.lease import LEASE_SECONDS, Holder, OutputLease, attempts_in, lease_name  # noqa: E402
from batchwright.jobs.remote.parts import Manifest, Part, attempt_of, new_epoch, remove_others  # noqa: E402
from batchwright.jobs.remote.remote_file import RemotePath  # noqa: E402

FOLDER = RemotePath("memory://leases/out.jsonl")


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield
    MemoryFileSystem.store.clear()


class World:
    """Machines with one clock, which moves while somebody waits."""

    def __init__(self, folder: Path, now: float = 1e9) -> None:
        self.folder = folder
        self.clock = ManualClock(now)
        self.meanwhile: Callable[[], object] = lambda: None
        """What happens while somebody waits."""

    def _pause(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.meanwhile()

    def lease(self, machine: str, at: RemotePath = FOLDER) -> OutputLease:
        note = self.folder / machine / "note"
        return OutputLease(at, note, clock=self.clock, wall=self.clock.now, pause=self._pause)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_lease_is_taken_and_given_up(world: World, tmp_path: Path) -> None:
    first = world.lease("a")
    first.take(after=4)
    assert first.attempt == 5
    assert FOLDER.listed() == [lease_name(5)]
    first.renew()
    first.release()
    first.release()
    assert FOLDER.listed() == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    first.renew()  # a thread that comes too late writes nothing
    assert FOLDER.listed() == []


def test_a_run_that_lives_is_named(world: World) -> None:
    first, second = world.lease("a"), world.lease("b")
    first.take(0)
    world.meanwhile = first.renew
    with pytest.raises(ResumeRefused, match=r"another run is writing memory://.*process \d+ on .*, since 20.*Wait"):
        second.take(0)
    first.renew()
    assert world.clock.now() - 1e9 < LEASE_SECONDS
    assert second.attempt == 0


def test_a_run_that_was_killed_is_followed_when_it_counts_as_dead(world: World) -> None:
    first, second, third = (world.lease(name) for name in "abc")
    first.take(0)
    second.take(0)
    assert world.clock.now() - 1e9 == pytest.approx(LEASE_SECONDS)
    assert second.attempt == 2
    with pytest.raises(ResumeRefused, match=r"taken over .*process \d+ on"):
        first.renew()
    with pytest.raises(ResumeRefused, match="taken over"):
        first.renew()
    first.release()
    assert FOLDER.listed() == [lease_name(2)]
    world.clock.advance(2 * LEASE_SECONDS)
    before = world.clock.now()
    third.take(0)
    assert world.clock.now() == before  # it is long since that one was heard of
    third.release()
    with pytest.raises(ResumeRefused, match="it has ended"):
        second.renew()


def test_on_the_same_machine_nobody_waits(world: World) -> None:
    world.lease("a").take(0)
    again = world.lease("a")
    again.take(0)
    assert (again.attempt, world.clock.now()) == (2, 1e9)
    assert FOLDER.listed() == [lease_name(2)]


def test_one_whose_clock_is_ahead_is_followed_too(world: World) -> None:
    ahead = ManualClock(2e9)
    OutputLease(FOLDER, world.folder / "a", clock=ahead, wall=ahead.now).take(0)
    world.lease("b").take(0)
    assert world.clock.now() - 1e9 == pytest.approx(LEASE_SECONDS)


def test_what_is_damaged_holds_nothing(world: World) -> None:
    (FOLDER / lease_name(3)).write_bytes(b"{")
    lease = world.lease("a")
    lease.take(0)
    assert lease.attempt == 4


@given(st.builds(Holder, st.text(), st.text(), st.integers(), st.floats(0, 1e12), st.floats(0, 1e12)))
@settings(deadline=None)
def test_holders_are_read_as_they_were_written(holder: Holder) -> None:
    assert Holder.decode(holder.encode()) == holder
    assert Holder.decode(holder.encode()[:-2]) is None


def test_parts_tell_their_attempts(world: World) -> None:
    names = [f"part-00000-{new_epoch(attempt)}.jsonl" for attempt in (0, 1, 2, 1_000_000)]
    assert [attempt_of(name) for name in names] == [0, 1, 2, 1_000_000]
    assert attempts_in([lease_name(7), lease_name(1_000_000), "_lease-x.json", "_manifest.json"]) == [7, 1_000_000]
    for name in names:
        (FOLDER / name).write_bytes(b"x")
    remove_others(FOLDER, Manifest("e", (Part(names[0], 1),), attempt=2))
    assert FOLDER.listed() == sorted([names[0], names[3]])


class Turns:
    """Threads of which one goes on at a time: at each request to the store, the next one is chosen."""

    def __init__(self, choose: Callable[[int], int]) -> None:
        self._choose = choose
        self._turn = threading.Condition()
        self._waiting: set[int] = set()
        self._running = 0
        self._chosen: int | None = None
        self._names = threading.local()

    def step(self) -> None:
        name = getattr(self._names, "name", None)
        if name is None:
            return
        with self._turn:
            self._waiting.add(name)
            self._running -= 1
            self._give_turn()
            self._turn.wait_for(lambda: self._chosen == name)
            self._chosen = None
            self._waiting.remove(name)
            self._running += 1

    def _give_turn(self) -> None:
        if not self._running and self._waiting:
            waiting = sorted(self._waiting)
            self._chosen = waiting[self._choose(len(waiting))]
            self._turn.notify_all()

    def run(self, *works: Callable[[], object]) -> None:
        def carry_out(name: int, work: Callable[[], object]) -> None:
            self._names.name = name
            self.step()
            try:
                work()
            finally:
                with self._turn:
                    self._running -= 1
                    self._give_turn()

        self._running = len(works)
        threads = [threading.Thread(target=carry_out, args=each) for each in enumerate(works)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class SteppedFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """`stepped://`: objects in memory, before each request to which others may go on."""

    protocol = "stepped"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    turns: ClassVar[Turns | None] = None
    conditional: ClassVar[bool] = True

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.replace("stepped://", "memory://")))

    def _step(self) -> None:
        if self.turns is not None:
            self.turns.step()

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self._step()
        return super().ls(path, detail, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        self._step()
        return bytes(super().cat_file(path, start, end, **options))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if mode == "create" and not self.conditional:
            raise NotImplementedError
        self._step()
        super().pipe_file(path, value, mode, **options)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "wb":
            self._step()
        return super()._open(path, mode, **options)

    def rm_file(self, path: str) -> None:
        self._step()
        super().rm_file(path)


@given(st.lists(st.integers(0, 2), max_size=80), st.booleans(), st.booleans())
@settings(max_examples=examples(12, long=30))
def test_of_those_that_come_at_once_one_holds_it(order: list[int], conditional: bool, killed_before: bool) -> None:
    """Also where a store has no conditional writes, as soon as all have looked once more."""
    fsspec.register_implementation("stepped", SteppedFileSystem, clobber=True)
    SteppedFileSystem.store.clear()
    SteppedFileSystem.conditional = conditional
    with TemporaryDirectory() as name:
        world = World(Path(name))
        leases = [world.lease(machine, RemotePath("stepped://b/out.jsonl")) for machine in "abcd"]
        if killed_before:
            leases.pop().take(3)
            world.clock.advance(10 * LEASE_SECONDS)
        held: list[OutputLease] = []

        def take(lease: OutputLease) -> None:
            with suppress(ResumeRefused):
                lease.take(0)
                lease.renew()
                held.append(lease)

        chosen = iter(order)
        SteppedFileSystem.turns = Turns(lambda count: next(chosen, 0) % count)
        try:
            SteppedFileSystem.turns.run(*[partial(take, lease) for lease in leases[:3]])
        finally:
            SteppedFileSystem.turns = None
        holding = []
        for lease in held:
            with suppress(ResumeRefused):
                lease.renew()
                holding.append(lease)
        assert len(holding) == 1
        if conditional:
            assert len({lease.attempt for lease in held}) == len(held)
