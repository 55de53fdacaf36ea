"""The journal of what a job spends, cut anywhere, and after a process that died while it wrote."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

from batchwright.errors import InputError, ResumeRefused
from batchwright.jobs.spend_journal import Settlement, SpendJournal, SpendTotals

KEY = "0a1b2c3d"
acts = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "batch", "settle", "release", "keep"]), st.integers(0, 10**13), st.floats(0, 1)
    ),
    max_size=10,
)


class Account:
    """What a journal must know, kept without one."""

    def __init__(self) -> None:
        self.spent = self.kept = self.lost = 0
        self.open: dict[int, tuple[int, bool]] = {}

    def seen(self) -> tuple[int, int, int, int]:
        """Spent, spent at most, requests whose cost is not known, and reserved in batches, as the next run sees it."""
        lives = [amount for amount, batch in self.open.values() if not batch]
        batches = [amount for amount, batch in self.open.values() if batch]
        return self.spent, self.kept + sum(lives), self.lost + len(lives), sum(batches)


def seen(journal: SpendJournal) -> tuple[int, int, int, int]:
    totals = journal.totals
    return totals.spent, totals.kept, totals.lost, sum(each.amount for each in journal.inherited.values())


def act(journal: SpendJournal, account: Account, what: str, amount: int, pick: float) -> bool:
    """Do one thing to both; False if it is not possible."""
    if what in ("reserve", "batch"):
        number = journal.reserve(f"req_{amount}_{len(account.open)}_{pick}", amount, batch=what == "batch")
        account.open[number] = amount, what == "batch"
        return True
    if not account.open:
        return False
    number = sorted(account.open)[int(pick * (len(account.open) - 1))]
    reserved, _ = account.open.pop(number)
    if what == "settle":
        cost = min(reserved, amount)
        journal.settle(number, Settlement(cost, 1, 2, 3, 4, 5))
        account.spent += cost
    elif what == "release":
        journal.release(number)
    else:
        journal.keep(number)
        account.kept += reserved
        account.lost += 1
    return True


@settings(max_examples=10)
@given(acts)
def test_cut_at_any_byte_it_tells_what_was_done_until_then(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[str, int, float]]
) -> None:
    path = tmp_path_factory.mktemp("journal") / "out.jsonl.spend"
    journal, account = SpendJournal(path, KEY), Account()
    states = [(0, account.seen())]
    for what, amount, pick in history:
        if act(journal, account, what, amount, pick):
            states.append((path.stat().st_size, account.seen()))
    if not path.exists():
        return
    content = path.read_bytes()
    cut = path.with_name("cut.spend")
    cut.write_bytes(content)
    for size in reversed(range(len(content) + 1)):
        os.truncate(cut, size)
        expected = max((length, number) for number, (length, _) in enumerate(states) if length <= size)[1]
        assert seen(SpendJournal(cut, KEY)) == states[expected][1]
    journal.close()
    left = [number for number, (_, batch) in account.open.items() if not batch]
    assert len(path.read_bytes().splitlines()) == 1 + len(account.open)
    assert seen(SpendJournal(path, KEY)) == account.seen()
    assert len(left) == len(account.open) - len(SpendJournal(path, KEY).inherited)


@settings(max_examples=examples(25, long=50))
@given(acts, st.integers(1, 4000))
def test_compacting_on_the_way_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[str, int, float]], longest: int
) -> None:
    path = tmp_path_factory.mktemp("journal") / "out.jsonl.spend"
    journal, account = SpendJournal(path, KEY, longest=longest), Account()
    for what, amount, pick in history:
        act(journal, account, what, amount, pick)
        if path.exists():
            assert seen(SpendJournal(path, KEY)) == account.seen()


def test_totals_go_on_over_many_runs(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl.spend"
    for run in range(1, 4):
        journal = SpendJournal(path, KEY)
        number = journal.reserve("req_1", 100)
        journal.settle(number, Settlement(10, 1, 2, 30, 4, 5))
        journal.close()
        expected = SpendTotals(10 * run, run, 0, 0, 0, run, 2 * run, 30 * run, 4 * run, 5 * run)
        assert SpendJournal(path, KEY).totals == journal.totals == expected
    assert journal.totals - replace(expected, spent=25, answers=1) == SpendTotals(5, 2)


def test_lines_in_batches_stay_reserved_for_those_who_take_them_up(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl.spend"
    journal = SpendJournal(path, KEY)
    for name in ("a", "b", "c"):
        journal.reserve(name, 100, batch=True)
    # Killed here, and again after it had begun to go on.
    journal = SpendJournal(path, KEY)
    assert {name: each.amount for name, each in journal.inherited.items()} == {"a": 100, "b": 100, "c": 100}
    journal.settle(journal.inherited["a"][0], Settlement(40))
    journal.release(journal.inherited["b"][0])
    journal = SpendJournal(path, KEY)
    assert (journal.totals.spent, journal.totals.kept, [*journal.inherited]) == (40, 0, ["c"])


def test_nothing_is_written_before_money_is_reserved(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl.spend"
    SpendJournal(path, KEY).close()
    assert not path.exists()


def test_what_was_spent_with_other_options_counts_too(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl.spend"
    journal = SpendJournal(path, KEY)
    journal.settle(journal.reserve("a", 100), Settlement(40))
    journal.reserve("b", 7, batch=True)
    other = SpendJournal(path, "other")
    assert (other.totals.spent, other.totals.kept, other.inherited) == (40, 7, {}), "nobody takes up its batches"
    assert SpendJournal(path, KEY, starts_over=True).totals == SpendTotals()
    assert (SpendJournal(path, KEY).totals.spent, len(SpendJournal(path, KEY).inherited)) == (40, 1)


@pytest.mark.parametrize(
    "content",
    [
        b"{}\n",
        b"nonsense\n",
        b'{"form":2,"job":"0a1b2c3d","totals":{}}\n',
        b'{"form":1,"job":"0a1b2c3d","totals":{"other":1}}\n',
        b'{"form":1,"job":"0a1b2c3d","totals":{}}\n{"act":"settle","number":1}\n',
        b'{"form":1,"job":"0a1b2c3d","totals":{}}\n{"act":"spend","number":1}\n',
    ],
)
def test_what_no_run_wrote_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl.spend"
    path.write_bytes(content)
    with pytest.raises(ResumeRefused, match=r"out\.jsonl\.spend was"):
        SpendJournal(path, KEY)
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        SpendJournal(tmp_path, KEY)


def test_on_a_full_disk_nothing_more_is_reserved_and_answers_are_counted(tmp_path: Path) -> None:
    journal = SpendJournal(tmp_path / "missing" / "out.jsonl.spend", KEY)
    with pytest.raises(FileNotFoundError):
        journal.reserve("a", 100)
    path = tmp_path / "out.jsonl.spend"
    journal = SpendJournal(path, KEY)
    number = journal.reserve("a", 100)
    full = os.open("/dev/full", os.O_WRONLY)
    assert journal._descriptor is not None
    os.dup2(full, journal._descriptor)
    os.close(full)
    journal.settle(number, Settlement(40))
    assert journal.totals.spent == 40
    with pytest.raises(OSError, match="No space left"):
        journal.reserve("b", 100)
    # The settlement is not on the disk: the next run counts the most that it may have been.
    assert seen(SpendJournal(path, KEY))[:2] == (0, 100)


_WRITER = """
import sys
from pathlib import Path
from batchwright.jobs.spend_journal import Settlement, SpendJournal

journal = SpendJournal(Path(sys.argv[1]), "0a1b2c3d", longest=20_000)
while True:
    number = journal.reserve("req", 1000)
    print("r", flush=True)
    journal.settle(number, Settlement(10))
    print("s", flush=True)
"""


def test_killed_while_it_writes_nothing_that_was_noted_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl.spend"
    chance = random.Random(1)
    before = SpendTotals()
    for _ in range(4):
        writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        told = b"".join(writer.stdout.readline() for _ in range(chance.randint(1, 2000)))
        writer.send_signal(signal.SIGKILL)
        told += writer.stdout.read()
        writer.wait()
        writer.stdout.close()
        totals = SpendJournal(path, KEY).totals
        answers, lost = totals.answers - before.answers, totals.lost - before.lost
        # What was told was noted; one thing more may have been.
        assert answers - told.count(b"s") in (0, 1)
        assert answers + lost - told.count(b"r") in (0, 1)
        assert (totals.spent, totals.kept) == (10 * totals.answers, 1000 * totals.lost)
        before = totals
