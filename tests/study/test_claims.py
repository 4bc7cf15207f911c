"""Claims, tried by real processes that race, freeze and are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from segcal.errors import ConfigError, SegcalError
from segcal.study import claims
from segcal.study.claims import Claim, ClaimLost, Claims, Holder

ELSEWHERE = {"worker": "0" * 32, "host": "elsewhere", "pid": 7, "machine": "another boot", "note": {"epoch": 3}}
START = """
import json, os, sys, time
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("claims", sys.argv[2])  # alone, for what the package imports would take seconds
claims = module_from_spec(spec)
spec.loader.exec_module(claims)
Claims, ClaimLost, folder = claims.Claims, claims.ClaimLost, sys.argv[1]
def say(thing): print(json.dumps(thing), flush=True)
def wait(): return sys.stdin.readline()
"""


class Worker:
    """A process that runs code and speaks by lines of JSON."""

    def __init__(self, folder, code: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", START + code, str(folder), claims.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self):
        line = self.process.stdout.readline()
        assert line, "the worker died"
        return json.loads(line)

    def go(self) -> None:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self.process.stdout.close()
        self.process.stdin.close()


@pytest.fixture
def worker(tmp_path) -> Iterator[Callable[[str], Worker]]:
    started = []

    def start(code: str) -> Worker:
        started.append(Worker(tmp_path, code))
        return started[-1]

    yield start
    for each in started:
        each.close()


def write(path, content=ELSEWHERE, *, age: float = 0.0) -> None:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    os.utime(path, (time.time() - age,) * 2)


def until(done: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def files(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_processes_that_race_win_each_name_exactly_once(tmp_path, worker):
    code = """
mine = Claims(folder)
say("ready"); wait()
held = [claim for i in range(20) if (claim := mine.take(f"job-{i}"))]
say([claim.name for claim in held]); wait()
"""
    workers = [worker(code) for _ in range(4)]
    for each in workers:
        each.hear()
    for each in workers:
        each.go()
    won = [each.hear() for each in workers]
    assert Counter(name for names in won for name in names) == {f"job-{i}": 1 for i in range(20)}
    here = Claims(tmp_path)
    for each, names in zip(workers, won, strict=True):
        assert {here.holder(name).pid for name in names} <= {each.process.pid}
    assert files(tmp_path) == sorted(f"job-{i}.1" for i in range(20))  # nothing else is left


def test_one_name_taken_and_released_again_and_again_is_never_held_by_two(tmp_path, worker):
    code = """
mine, other = Claims(folder, beat_s=0.005), os.path.join(folder, "witness")
end, done = time.monotonic() + 0.8, 0
while time.monotonic() < end:
    mine.holder("job")
    claim = mine.take("job")
    if claim is None: continue
    with claim:
        os.close(os.open(other, os.O_CREAT | os.O_EXCL))  # fails if another is in here
        claim.tell(done=done)
        time.sleep(0.01)
        claim.check()
        os.unlink(other)
    done += 1
say(done)
"""
    done = [each.hear() for each in [worker(code) for _ in range(3)]]
    assert sum(done) >= 5
    assert len(files(tmp_path)) == sum(done)  # one generation for each time it was held
    assert Claims(tmp_path).holder("job") is None


def test_a_killed_worker_frees_its_name_at_once(tmp_path, worker):
    holder = worker("claim = Claims(folder).take('job'); say(claim is not None); wait()")
    assert holder.hear()
    here = Claims(tmp_path)
    assert here.take("job") is None
    assert here.holder("job").pid == holder.process.pid
    holder.kill()
    assert here.holder("job") is None
    with here.take("job"):
        assert here.holder("job").pid == os.getpid()


def test_a_child_that_outlives_a_killed_worker_does_not_hold_its_name(tmp_path, worker):
    holder = worker("""
claim = Claims(folder).take('job')
if os.fork() == 0:
    claim.release()  # not the child's to release
    say(os.getpid())
    time.sleep(30)
    os._exit(0)
wait()
""")
    child = holder.hear()
    try:
        here = Claims(tmp_path)
        assert here.holder("job").pid == holder.process.pid
        holder.kill()
        os.kill(child, 0)
        assert here.holder("job") is None
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_claim_of_another_machine_holds_while_it_is_young(tmp_path):
    here = Claims(tmp_path, patience_s=60)
    write(tmp_path / "job.1", age=50)
    assert here.take("job") is None
    assert here.holder("job") == Holder("elsewhere", 7, {"epoch": 3})
    write(tmp_path / "job.1", age=70)
    assert here.holder("job") is None
    with here.take("job"):
        assert here.holder("job").pid == os.getpid()


def test_the_clock_of_this_machine_does_not_count(tmp_path, monkeypatch):
    here = Claims(tmp_path, patience_s=60)
    write(tmp_path / "young.1", age=50)
    write(tmp_path / "old.1", age=70)
    for name in ("time", "time_ns", "monotonic"):
        monkeypatch.setattr(time, name, lambda: 0)
    assert here.holder("young") is not None
    assert here.holder("old") is None


@pytest.mark.parametrize("machine", ["another boot", claims._machine()], ids=["elsewhere", "here"])
def test_of_many_takers_of_a_dead_claim_one_wins(tmp_path, machine):
    takers, rounds = 4, 12
    for i in range(rounds):
        write(tmp_path / f"job-{i}.1", {**ELSEWHERE, "machine": machine}, age=1000)
    won: list[Claim] = []
    barrier = threading.Barrier(takers)

    def take() -> None:
        mine = Claims(tmp_path)
        for i in range(rounds):
            barrier.wait()
            if claim := mine.take(f"job-{i}"):
                won.append(claim)

    threads = [threading.Thread(target=take) for _ in range(takers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claim.name for claim in won) == sorted(f"job-{i}" for i in range(rounds))
    for claim in won:
        claim.check()
        claim.release()


def test_one_who_looks_at_a_dead_claim_is_not_taken_for_its_holder(tmp_path):
    write(tmp_path / "job.1", {**ELSEWHERE, "machine": claims._machine()})
    with (tmp_path / "job.1").open() as file:
        assert claims._locked(file.fileno()) is False  # still looking
        with Claims(tmp_path).take("job") as claim:
            claim.check()


def test_a_taker_that_looked_long_ago_gets_nothing(tmp_path, monkeypatch):
    late, others = Claims(tmp_path), Claims(tmp_path)
    look = late._look

    def look_and_sleep(name):
        seen = look(name)
        for _ in range(3):  # meanwhile it is taken and released over and over
            others.take(name).release()
        return seen

    monkeypatch.setattr(late, "_look", look_and_sleep)
    assert late.take("job") is None
    assert files(tmp_path) == ["job.1", "job.2", "job.3"]


def test_a_frozen_worker_is_overtaken_and_notices(tmp_path, worker):
    holder = worker("""
claims._machine = lambda: "another boot"
claim = Claims(folder, beat_s=0.05, patience_s=2.0).take("job")
claim.check()
say("held"); wait()
try:
    claim.check()
    say("still held")
except ClaimLost as error:
    say([claim.lost, str(error)])
claim.release()
say("released")
""")
    holder.hear()
    here = Claims(tmp_path, beat_s=0.05, patience_s=2.0)
    end = time.monotonic() + 2.3
    while time.monotonic() < end:  # beats keep it longer than patience
        assert here.take("job") is None
        time.sleep(0.05)
    holder.process.send_signal(signal.SIGSTOP)
    until(lambda: here.holder("job") is None)
    with here.take("job") as claim:
        holder.process.send_signal(signal.SIGCONT)
        holder.go()
        lost, message = holder.hear()
        assert lost
        assert f"(process {os.getpid()}) has it now" in message
        assert "take another" in message
        assert holder.hear() == "released"
        claim.check()  # which took nothing from the new holder
        assert here.holder("job").pid == os.getpid()


@pytest.mark.parametrize("harm", ["overtaken", "removed"])
def test_a_worker_notices_by_itself_that_its_claim_is_lost(tmp_path, harm):
    with Claims(tmp_path, beat_s=0.02).take("job") as claim:
        assert not claim.lost
        if harm == "overtaken":
            write(tmp_path / "job.2")
        else:
            (tmp_path / "job.1").unlink()
        until(lambda: claim.lost)
        with pytest.raises(ClaimLost, match="must be held") as caught:
            claim.check()
        assert isinstance(caught.value, SegcalError)
        claim.tell(epoch=1)
    assert files(tmp_path) == (["job.1", "job.2"] if harm == "overtaken" else [])


def test_a_released_name_can_be_taken_again(tmp_path):
    here, there = Claims(tmp_path), Claims(tmp_path)
    with here.take("job") as claim:
        assert there.take("job") is None
        assert here.take("job") is None
        assert claim.name == "job"
    assert here.holder("job") is None
    with pytest.raises(ClaimLost, match="released it"):
        claim.check()
    again = there.take("job")
    claim.release()  # a second time, to no effect
    again.check()
    again.release()
    assert not [thread for thread in threading.enumerate() if thread.name == "claim on job"]


def test_an_exception_releases(tmp_path):
    here = Claims(tmp_path)
    with pytest.raises(RuntimeError, match="failed"), here.take("job"):
        raise RuntimeError("failed")
    assert json.loads((tmp_path / "job.1").read_text())["worker"] is None
    here.take("job").release()


def test_names_that_look_like_generations_do_not_mix(tmp_path):
    here = Claims(tmp_path)
    names = ["a", "a.1", "a.1.2", "a.x", "..", "-", "a_"]
    held = [here.take(name) for name in names]
    assert all(held)
    assert all(here.take(name) is None for name in names)
    for claim in held:
        claim.release()


def test_notes_are_seen_by_another_process_and_never_in_part(tmp_path, worker):
    holder = worker("""
claim = Claims(folder, beat_s=0.005).take("job")
say("held")
for step in range(1001):
    claim.tell(step=step, twice=[step, step], long="x" * step)
    time.sleep(0.0005)
wait()
""")
    holder.hear()
    here, seen = Claims(tmp_path), set()
    while 1000 not in seen:
        found = here.holder("job")
        assert found is not None, "a live holder looked dead"
        assert found.pid == holder.process.pid
        if found.note:
            step = found.note["step"]
            assert found.note == {"step": step, "twice": [step, step], "long": "x" * step}
            seen.add(step)
        assert here.take("job") is None
    assert len(seen) > 5  # the file was replaced under our eyes


def test_notes_are_cheap_and_written_about_once_a_second(tmp_path):
    here = Claims(tmp_path)
    with here.take("job") as claim:
        inodes, start, told = set(), time.monotonic(), 0
        while time.monotonic() < start + 1.1:
            claim.tell(step=(told := told + 1))
            inodes.add((tmp_path / "job.1").stat().st_ino)
        assert told > 1000
        assert len(inodes) <= 3
        until(lambda: here.holder("job").note == {"step": told})
        with pytest.raises(ConfigError, match="A note must be plain"):
            claim.tell(step=object())


@pytest.mark.parametrize("name", ["", "a/b", "a b", "../a", "a~", "ä", "a\n", "x" * 201])
def test_bad_names_are_refused(tmp_path, name):
    for ask in (Claims(tmp_path).take, Claims(tmp_path).holder):
        with pytest.raises(ConfigError, match="name of a job must be"):
            ask(name)
    assert files(tmp_path) == []


@pytest.mark.parametrize(("beat", "patience"), [(0, 1), (-1, 1), (2, 1), (1, 1), (float("nan"), 1)])
def test_a_beat_that_is_slower_than_patience_is_refused(tmp_path, beat, patience):
    with pytest.raises(ConfigError, match="beat_s must be above 0"):
        Claims(tmp_path, beat_s=beat, patience_s=patience)


@pytest.mark.parametrize(
    "garbage", ["", "{", "[]", "null", "7", '{"worker": "a"}', json.dumps({**ELSEWHERE, "pid": "x"}), "[" * 100_000]
)
def test_garbage_holds_while_young_and_is_taken_over_when_old(tmp_path, garbage):
    here = Claims(tmp_path, patience_s=60)
    write(tmp_path / "job.3", garbage, age=50)
    assert here.take("job") is None
    assert here.holder("job").note == {}
    write(tmp_path / "job.3", garbage, age=70)
    with here.take("job"):
        assert (tmp_path / "job.4").exists()


def test_errors_of_the_file_system_that_pass_do_no_harm(tmp_path, monkeypatch):
    here = Claims(tmp_path, beat_s=0.02)
    with here.take("job") as claim:
        tried = []

        def fail(*args, **kwargs):
            tried.append(args)
            raise OSError("not now")

        with monkeypatch.context() as patch:
            for name in ("utime", "listdir", "replace", "fsync"):
                patch.setattr(os, name, fail)
            claim.tell(epoch=5)
            until(lambda: len(tried) > 6)
            claim.check()
        os.utime(tmp_path / "job.1", (0, 0))
        until(lambda: (tmp_path / "job.1").stat().st_mtime > 0)
        until(lambda: here.holder("job").note == {"epoch": 5})
        claim.check()
    assert files(tmp_path) == ["job.1"]


def test_a_file_system_without_links_or_locks_serves_too(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    here = Claims(tmp_path, beat_s=0.02, patience_s=60)
    with here.take("linkless"):
        assert here.take("linkless") is None
    here.take("linkless").release()
    monkeypatch.setattr(claims.fcntl, "flock", refuse)
    with here.take("lockless"):
        assert here.holder("lockless").pid == os.getpid()
        assert here.take("lockless") is None
    assert here.holder("lockless") is None
    assert files(tmp_path) == ["linkless.1", "linkless.2", "lockless.1"]


def test_a_link_that_was_made_though_it_failed_is_ours(tmp_path, monkeypatch):
    link = os.link

    def link_twice(source, target):
        link(source, target)
        raise FileExistsError(17, "File exists")

    monkeypatch.setattr(os, "link", link_twice)
    with Claims(tmp_path).take("job") as claim:
        claim.check()
