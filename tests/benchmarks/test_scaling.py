"""Replicas on devices of known speed in virtual time, with lengths that are drawn like those of a real service."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from benchmarks.replicas.device import ACCELERATOR, CORES, Device, Job
from benchmarks.replicas.jobs import lengths, make_jobs
from benchmarks.replicas.simulation import bound, most_reused, simulate

PAIRS = lengths(None, random.Random(0))


@pytest.mark.parametrize("devices", [2, 8, pytest.param(64, marks=pytest.mark.long)])
def test_routed_lines_are_near_the_bound_and_find_their_prefixes(devices: int) -> None:
    jobs = make_jobs(PAIRS, min(len(PAIRS), max(8000, 1500 * devices)), groups=100)
    routed = simulate(jobs, devices, CORES)
    assert routed.makespan <= 1.03 * bound(jobs, devices, CORES)
    assert routed.reused >= 0.95 * most_reused(jobs)
    assert routed.longest_idle == 0.0
    for other in ("static", "blocks"):
        outcome = simulate(jobs, devices, CORES, other)
        assert outcome.makespan > routed.makespan
        assert outcome.reused < routed.reused


def test_one_replica_computes_what_the_bound_says() -> None:
    jobs = make_jobs(PAIRS, 2000, groups=40)
    outcome = simulate(jobs, 1, CORES)
    assert bound(jobs, 1, CORES) <= outcome.makespan <= 1.03 * bound(jobs, 1, CORES)
    assert outcome.reused >= 0.95 * most_reused(jobs)


def test_lines_without_common_prefixes_are_spread_as_well() -> None:
    jobs = [replace(job, group=job.number, prefix_keys=0) for job in make_jobs(PAIRS, 4000, groups=40)]
    assert simulate(jobs, 16, CORES).makespan <= 1.05 * bound(jobs, 16, CORES)


def test_a_device_takes_the_time_that_its_speed_says() -> None:
    device = Device(ACCELERATOR)
    for number in range(2):
        device.add(Job(number, 1000, 10, 10, group=7, prefix_keys=10), 0.0)
    now, ended = 0.0, 0
    while (at := device.next_end()) is not None:
        now = at
        ended += len(device.advance(now))
    prompts = (2 * 1000 - 640) * ACCELERATOR.prefill
    assert now == pytest.approx(prompts + 10 * (ACCELERATOR.step + 2 * ACCELERATOR.row))
    assert (ended, device.reused) == (2, 640)
