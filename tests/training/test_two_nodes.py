"""One training on two machines: two launches of torchrun, each with a loopback address and folders of its own.

Run as a script, this file is what each launch starts.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script it has no conftest.py

import layouts
import pytest
import tiny
import torch
import workers

from segcal.datasets import Split
from segcal.errors import ConfigError
from segcal.training import loop
from segcal.training.checkpoint import load_checkpoint

pytestmark = [
    pytest.mark.long,  # test_two_processes.py is the short form
    pytest.mark.skipif(sys.platform != "linux", reason="needs 127.0.0.2, and /proc to see who talks to whom"),
]

ADDRESSES = ("127.0.0.2", "127.0.0.3")
EPOCHS = 2
NEVER = EPOCHS + 1
PATIENCE = 300  # seconds, for processes that import torch and may compile before they train an instant
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


def run_node(address: str, dies_in: int, folder: Path, arguments: list[str]) -> None:
    """The command `segcal train` on a machine with this address, which dies at the beginning of that epoch."""
    use_address(address)
    train_epoch = loop._Training._train_epoch

    def die_or_tell(training, network, loader, epoch):
        if epoch == dies_in:
            for process in (os.getppid(), os.getpid()):  # torchrun, then this one
                os.kill(process, signal.SIGKILL)
        row = train_epoch(training, network, loader, epoch)
        (folder / "sockets.json").write_text(json.dumps(own_sockets()))  # before validation, where all still talk
        return row

    loop._Training._train_epoch = die_or_tell
    workers.train_under_torchrun(folder, arguments)


def use_address(address: str) -> None:
    """Let gloo listen there alone, as GLOO_SOCKET_IFNAME does for a whole interface."""
    c10d = torch.distributed.distributed_c10d
    gloo = c10d.ProcessGroupGloo

    class GlooThere(gloo):
        def __init__(self, store, rank, size, timeout):
            options = gloo._Options()
            options._timeout, options._devices = timeout, [gloo.create_device(hostname=address)]
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = GlooThere


def own_sockets() -> dict[str, list[list]]:
    """The ends of this process's TCP sockets as [host, port]: where it listens, and [here, there] of its talks."""

    def end(text: str) -> list:
        host, port = text.split(":")
        return [socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)]

    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    mine = {os.readlink(link) for link in links if os.path.islink(link)}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    rows = [row for row in rows if f"socket:[{row[9]}]" in mine]
    return {
        "listens": [end(row[1]) for row in rows if row[3] == "0A"],
        "talks": [[end(row[1]), end(row[2])] for row in rows if row[3] == "01"],
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder for each node, with its own copy of the data, and one for what the processes tell."""
    place = tmp_path_factory.mktemp("nodes")
    data = layouts.write_acdc(tmp_path_factory.mktemp("acdc"))
    for node in ("one", "first", "second"):
        shutil.copytree(data, place / node / "data")
        (place / node / "told").mkdir()
    return place


def train_arguments(node: Path) -> list[str]:
    sets = [part for change in tiny.changes(epochs=EPOCHS) for part in ("--set", change)]
    data = ["--dataset", "acdc", "--data-root", str(node / "data"), "--prepared", str(node / "prepared")]
    return ["train", *data, "--method", "soft-ace", "--out", str(node / "run"), *sets]


def free_port() -> int:
    with socket.socket() as any_port:
        any_port.bind((ADDRESSES[0], 0))
        return any_port.getsockname()[1]


def start_two_nodes(place: Path, *, second_dies_in: int = NEVER) -> list[SimpleNamespace]:
    """Both launches to their end: what each returned and said."""
    port, started = free_port(), []
    for rank, node in enumerate((place / "first", place / "second")):
        where = ["--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1", "--local-addr", ADDRESSES[rank]]
        meet = ["--master-addr", ADDRESSES[0], "--master-port", str(port)]
        dies_in = second_dies_in if rank == 1 else NEVER
        command = [*TORCHRUN, *where, *meet, __file__, ADDRESSES[rank], str(dies_in), str(node / "told")]
        started.append(
            subprocess.Popen(
                [*command, *train_arguments(node)],
                env=ONE_THREAD, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    try:
        said = [process.communicate(timeout=PATIENCE)[1] for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()  # torchrun takes its processes along, and may wait for its partner itself
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                process.kill()
    return [SimpleNamespace(code=process.returncode, said=text) for process, text in zip(started, said, strict=True)]


@pytest.fixture(scope="module")
def killed(place) -> SimpleNamespace:
    """Both nodes, of which the second died in epoch 2, and the epoch of the checkpoint that was left."""
    nodes = start_two_nodes(place, second_dies_in=2)
    return SimpleNamespace(nodes=nodes, epoch=load_checkpoint(place / "first" / "run" / "last.pt")["epoch"])


@pytest.fixture(scope="module")
def resumed(place, killed) -> list[SimpleNamespace]:
    """Both nodes started again."""
    return start_two_nodes(place)


def test_a_node_whose_partner_died_ends_with_an_error_and_the_last_checkpoint(killed):
    first, second = killed.nodes
    assert second.code == -signal.SIGKILL
    assert first.code == 1, first.said
    assert killed.epoch == 1


def test_only_the_first_node_writes_the_folder_of_the_run(place, resumed):
    assert {"config.toml", "last.pt", "log.csv"} <= {path.name for path in (place / "first" / "run").iterdir()}
    assert not list((place / "second" / "run").iterdir())


def test_the_same_two_commands_go_on_from_the_last_checkpoint(place, resumed):
    assert [node.code for node in resumed] == [0, 0], [node.said for node in resumed]
    assert load_checkpoint(place / "first" / "run" / "last.pt")["epoch"] == EPOCHS


def test_each_node_has_an_address_of_its_own(place, resumed):
    first, second = (json.loads((place / node / "told" / "sockets.json").read_text()) for node in ("first", "second"))
    for found, address in zip((first, second), ADDRESSES, strict=True):
        assert [host for host, port in found["listens"]] == [address]
    talks = {frozenset(map(tuple, talk)) for talk in first["talks"]} & {
        frozenset(map(tuple, talk)) for talk in second["talks"]
    }
    assert talks  # one process's end and the other's are one connection, which goes to one of these addresses
    assert all({host for host, port in talk} & set(ADDRESSES) for talk in talks)


def test_two_nodes_end_with_the_weights_of_two_processes_on_one(place, resumed):
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", workers.__file__, str(place / "one" / "told")]
    done = subprocess.run(
        [*command, *train_arguments(place / "one")],
        env=ONE_THREAD, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = load_checkpoint(place / "one" / "run" / "last.pt")["network"]
    found = {
        "the checkpoint": load_checkpoint(place / "first" / "run" / "last.pt")["network"],
        "the first node": torch.load(place / "first" / "told" / "0.pt", weights_only=True),
        "the second node": torch.load(place / "second" / "told" / "1.pt", weights_only=True),
    }
    for who, weights in found.items():
        assert weights.keys() == expected.keys()
        for name, values in weights.items():
            torch.testing.assert_close(values, expected[name], msg=lambda text, who=who: f"{who}: {text}")


def test_processes_with_other_settings_or_another_split_are_refused():
    split = Split(train=("a",), validation=("b",), test=("c",))
    other = Split(train=("b",), validation=("a",), test=("c",))
    loop._check_alike([("same", split), ("same", split)])
    with pytest.raises(ConfigError, match="must have the settings of the first; process 1 has others"):
        loop._check_alike([("one", split), ("other", split)])
    with pytest.raises(ConfigError, match="must have the split of the first; process 1 has others"):
        loop._check_alike([("same", split), ("same", other)])


if __name__ == "__main__":
    run_node(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
