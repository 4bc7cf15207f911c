"""Loggers of the caller: told of every epoch once its checkpoint stands, and never the end of a run."""

from __future__ import annotations

import csv
from pathlib import Path

import layouts
import pytest
import tiny
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from segcal.training import train
from segcal.training.checkpoint import load_checkpoint
from segcal.training.log import Log

pytestmark = pytest.mark.usefixtures("one_thread")
TRAINING = ("learning_rate", "loss", "dice_loss", "ce_loss", "ace_loss", "seconds")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return layouts.write_acdc(tmp_path_factory.mktemp("acdc"))


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "log.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def names(values) -> set[str]:
    return {name.partition("/")[0] for name in values}


def row(epoch: int) -> dict[str, float]:
    return {"epoch": epoch, **dict.fromkeys(TRAINING, float(epoch)), "ace": 0.25}


def tell(log: Log, *epochs: int) -> None:
    for epoch in epochs:
        log.add(row(epoch))
        log.write()


def test_a_logger_gets_the_numbers_of_the_files_under_the_names_of_tensorboard(root, tmp_path):
    told = {}
    config = tiny.tiny_config("acdc", root, epochs=3, more=("training.validate_every=2",))
    train(config, tmp_path / "run", loggers=[told.__setitem__])
    assert list(told) == [1, 2, 3]
    assert [names(values) for values in told.values()] == [
        {"training"},
        {"training", "validation"},
        {"training", "validation"},  # the last epoch always
    ]
    for line, values in zip(rows(tmp_path / "run"), told.values(), strict=True):
        assert {name: float(line[name.partition("/")[2]]) for name in values} == values
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    assert set(board.Tags()["scalars"]) == set(told[3])
    for name in told[3]:
        points = {event.step: event.value for event in board.Scalars(name)}
        assert points == pytest.approx({epoch: values[name] for epoch, values in told.items() if name in values})


def test_it_is_told_after_the_checkpoint_stands(root, tmp_path):
    kept = []
    train(
        tiny.tiny_config("acdc", root, epochs=2),
        tmp_path / "run",
        loggers=[lambda epoch, values: kept.append((epoch, load_checkpoint(tmp_path / "run" / "last.pt")["epoch"]))],
    )
    assert kept == [(1, 1), (2, 2)]


def test_a_run_that_goes_on_tells_the_last_epoch_before_again_and_no_earlier_one(root, tmp_path):
    config, told = tiny.tiny_config("acdc", root, epochs=4), []

    def killed(epoch, values):
        told.append((epoch, values))
        if epoch == 2:
            raise KeyboardInterrupt  # between the checkpoint and whatever else the epoch would have told

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", loggers=[killed])
    again = []
    train(config, tmp_path / "run", loggers=[lambda epoch, values: again.append((epoch, values))])
    assert [epoch for epoch, _ in told] == [1, 2]
    assert [epoch for epoch, _ in again] == [2, 3, 4]
    assert again[0] == told[1]


def test_a_logger_that_fails_loses_no_run_and_is_told_again_when_it_is_back(root, tmp_path):
    said, told, calls = [], [], []

    def away(epoch, values):
        calls.append(epoch)
        if len(calls) in (2, 3):
            raise ConnectionError("no route to host")
        told.append(epoch)

    done = train(tiny.tiny_config("acdc", root, epochs=4), tmp_path / "run", loggers=[away], say=said.append)
    assert done.epochs == 4
    assert calls == [1, 2, 2, 2, 3, 4]  # epoch 2 failed twice; when it was taken, those since came, too
    assert told == [1, 2, 3, 4]
    (sentence,) = [text for text in said if text.startswith("logger")]  # once
    assert sentence.startswith("logger 1 failed in epoch 2: ConnectionError: no route to host. Training continues")


def test_one_that_never_comes_back_is_named_at_the_end_and_keeps_nothing_from_the_others(tmp_path):
    said, told = [], []

    def broken(epoch, values):
        if epoch > 1:
            raise ValueError("no such experiment")

    def meddling(epoch, values):
        values.clear()  # its own affair

    log = Log(tmp_path, loggers=[broken, meddling, lambda epoch, values: told.append(len(values))], say=said.append)
    tell(log, 1, 2, 3)
    log.close()
    assert told == [len(TRAINING) + 1] * 3
    assert said[0].startswith("logger 1 failed in epoch 2: ValueError: no such experiment")
    assert said[1:] == ["logger 1 did not take these epochs: 2, 3. They are in log.csv."]
    assert [line["epoch"] for line in rows(tmp_path)] == ["1", "2", "3"]
