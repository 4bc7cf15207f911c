"""A pool of processes gives each job once, whoever of its workers dies."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool

import jobs
import pytest

from segcal._io.jobs import Pool


@pytest.fixture(params=[None, "jobs"], ids=["spawned", "forked"])
def preload(request):
    return request.param


def test_a_job_that_kills_every_process_is_told_and_the_others_are_done(preload):
    came = dict(Pool(2, preload=preload)(jobs.die_at, [(i, 3) for i in range(8)]))
    assert isinstance(came.pop(3), BrokenProcessPool)
    assert came == {i: i for i in range(8) if i != 3}


def test_a_job_whose_process_dies_once_is_done_by_another(tmp_path, preload):
    assert dict(Pool(2, preload=preload)(jobs.die_once, [(i, tmp_path) for i in range(4)])) == {i: i for i in range(4)}
    assert (tmp_path / "died").exists()


def test_what_a_job_raises_is_raised_here(preload):
    with pytest.raises(ZeroDivisionError):
        list(Pool(2, preload=preload)(divmod, [(1, 1), (1, 0)]))


def test_workers_share_cores_and_have_variables_of_their_own(monkeypatch, preload):
    """Those of this process now, too, and not of when the first workers began."""
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    for name in ("A", "B"):
        monkeypatch.setenv("SEEN", name)
        assert {seen for _, (_, seen, _) in Pool(2, preload=preload)(jobs.environment, [("SEEN",)] * 2)} == {name}
    pool = Pool(2, preload=preload, environments=[{"SEAT": "a"}, {"SEAT": "b"}])
    found = [came for _, came in pool(jobs.environment, [("SEAT",)] * 6)]
    assert {seat for _, seat, _ in found} == {"a", "b"}
    assert len({pid for pid, *_ in found}) == 2
    assert {threads for *_, threads in found} == {"3"}


def test_one_worker_is_this_process():
    assert list(Pool(1)(os.getpid, [(), ()])) == [(0, os.getpid()), (1, os.getpid())]
    assert list(Pool(5)(os.getpid, [()])) == [(0, os.getpid())]


def test_what_workers_need_is_there_before_they_begin():
    """And torch is not, which a worker that measures does without."""
    code = "import segcal.evaluation.ready, sys; print(*(name in sys.modules for name in ('scipy.ndimage', 'torch')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
