"""The training loop: epochs of patches, validation on whole images, a checkpoint after every epoch.

Everything random follows from the seed and the epoch, so a killed run that is started again with the same
command resumes from its last checkpoint and ends, on one CPU process, with the same weights.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import segcal
from segcal._io.files import locked, make_folder, write_whole
from segcal.datasets import Dataset, Split, make_split, open_dataset, read_split, write_split
from segcal.errors import ConfigError, FileError, SegcalError
from segcal.training.checkpoint import BEST, LAST, load_checkpoint, save_checkpoint
from segcal.training.config import NO_MATTER, RunConfig, read_config
from segcal.training.data import patch_loader
from segcal.training.distributed import Processes, processes
from segcal.training.inference import build_network, evaluate_prepared
from segcal.training.log import Log, Logger
from segcal.training.preprocessing import PreparedStore
from segcal.training.runs import remember

LOCK = ".lock"  # in a run's folder; who holds it may write there
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class TrainedRun:
    """Where a run's files are, and how it did on validation cases."""

    folder: Path
    epochs: int
    best_epoch: int
    best_dice: float


def train(
    config: RunConfig,
    out: str | os.PathLike[str],
    *,
    prepared: str | os.PathLike[str] | None = None,
    loggers: Sequence[Logger] = (),
    progress: Progress = lambda done, total, text: None,
    say: Callable[[str], None] = lambda text: None,
    held: bool = False,
) -> TrainedRun:
    """Train as the configuration says, or go on where the run in `out` stopped.

    Prepared images are kept in `prepared` (beside `out` by default), which runs on the same data share. Each of
    `loggers` is called with an epoch and its values by name, as they are on TensorBoard, once the epoch's checkpoint
    stands; a resumed run sends the last epoch before again, since it may have been lost. Under torchrun every
    process calls this; the first one writes, tells its `loggers`, reports its `progress`, and has its `say`. The lock
    of `out` is taken, unless the caller has `held` it already, for more than the training.
    """
    folder = Path(out)
    dataset = open_dataset(config.data.dataset, config.data.root)
    config = config.resolved(dataset)
    split = make_split(dataset, seed=config.data.split_seed, file=config.data.split)
    store = PreparedStore(Path(prepared or folder.parent / "prepared"), dataset, config.data)
    make_folder(folder)
    with processes() as team, locked(folder / LOCK, folder) if team.first and not held else nullcontext():
        if team.first:
            _claim(folder, config, dataset, split, say)
        _check_alike(team.gather((config.hash, split)))  # once the first has looked at the folder
        log = Log(folder, loggers=loggers, say=say)
        return _Training(config, folder, dataset, split, store, team, log, say).run(progress)


def _claim(folder: Path, config: RunConfig, dataset: Dataset, split: Split, say: Callable[[str], None]) -> None:
    """Make the folder this run's, or see that it is; say what is special about the data."""
    path, split_path = folder / "config.toml", folder / "split.txt"
    if any((folder / name).exists() for name in (LAST, BEST)):  # before that, nothing is lost
        there = read_config(path)
        if there.hash != config.hash:
            raise ConfigError(
                f"{folder} holds another run, which differs in {_difference(there, config)}. Choose another --out."
            )
        if read_split(split_path, dataset) != split:
            raise ConfigError(f"{folder} holds a run with another split, {split_path}. Choose another --out.")
    for sentence in (split.note, *(f"{problem.case} is left out: {problem.what}" for problem in dataset.problems)):
        if sentence:
            say(sentence)
    write_split(split, split_path)
    remember(folder, dataset)
    config.save(path)
    versions = {"segcal": segcal.__version__, "torch": torch.__version__, "python": platform.python_version()}
    write_whole(folder / "versions.json", json.dumps(versions, indent=2).encode())


def _check_alike(told: Sequence[tuple[str, Split]]) -> None:
    """All processes must train the same: on other machines they have commands, and perhaps data, of their own."""
    for rank, (settings, split) in enumerate(told):
        what = "settings" if settings != told[0][0] else "split" if split != told[0][1] else None
        if what is not None:
            raise ConfigError(
                f"every process must have the {what} of the first; process {rank} has others. Give all of them the "
                "same command and the same data."
            )


def _difference(a: RunConfig, b: RunConfig) -> str:
    def flat(content: Any, prefix: str = "") -> dict[str, Any]:
        if not isinstance(content, dict):
            return {prefix.rstrip("."): content}
        return {k: v for key, value in content.items() for k, v in flat(value, f"{prefix}{key}.").items()}

    one, other = flat(a.model_dump(mode="json")), flat(b.model_dump(mode="json"))
    keys = [key for key in sorted(one | other) if one.get(key) != other.get(key) and key not in NO_MATTER]
    return ", ".join(f"{key} ({one.get(key)} there, {other.get(key)} now)" for key in keys)


class _Training:
    """What a run holds while it runs."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        dataset: Dataset,
        split: Split,
        store: PreparedStore,
        team: Processes,
        log: Log,
        say: Callable[[str], None],
    ) -> None:
        self.config, self.folder, self.dataset, self.store, self.team = config, folder, dataset, store, team
        self.log, self.say = log, say
        by_name = {case.name: case for case in dataset.cases}
        self.cases = [by_name[name] for name in split.train]
        self.validation = [by_name[name] for name in split.validation]
        if not (self.cases and self.validation):
            raise ConfigError(
                f"the split must have cases to train and to validate; it has {len(self.cases)} and "
                f"{len(self.validation)}."
                " Change data.split."
            )
        torch.manual_seed(config.seed)
        self.network = build_network(config, dataset).to(team.device)
        self.loss = config.loss.build().to(team.device)
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=self._peak_rate, weight_decay=config.training.weight_decay
        )
        self.half = config.training.mixed_precision and team.device.type == "cuda"
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.half)
        self.best_epoch, self.best_dice = 0, -math.inf

    @property
    def _peak_rate(self) -> float:
        assert self.config.training.learning_rate is not None  # resolved
        return self.config.training.learning_rate

    def run(self, progress: Progress) -> TrainedRun:
        epochs = self.config.training.epochs
        assert epochs is not None  # resolved
        done = self._resume()
        progress(done, epochs, "preparing images" if done == 0 else f"going on after epoch {done}")
        if done < epochs:
            self._prepare(lambda text: progress(done, epochs, text))
        network = self.team.wrap(self.network)
        loader, order = patch_loader(self.cases, self.store, self.config, self.team)
        for epoch in range(done + 1, epochs + 1):
            order.epoch = epoch
            row = self._train_epoch(network, loader, epoch)
            if epoch % self.config.training.validate_every == 0 or epoch == epochs:
                row |= self._validate(epoch)
            self.log.add(row)
            if self.team.first:
                self._save(epoch)
                self.log.write()
            dice = f", validation DSC {row['dice']:.4f}" if "dice" in row else ""
            progress(epoch, epochs, f"loss {row['loss']:.4f}{dice}")
        self.log.close()
        return TrainedRun(self.folder, epochs, self.best_epoch, self.best_dice)

    def _train_epoch(self, network: nn.Module, loader: Any, epoch: int) -> dict[str, float]:
        network.train()
        # Dropout and the like start anew each epoch, so that an interrupted run draws the same.
        torch.manual_seed(int(np.random.default_rng([self.config.seed, 2, epoch, self.team.rank]).integers(2**62)))
        start, sums = time.perf_counter(), torch.zeros(4, dtype=torch.float64, device=self.team.device)
        for step, (image, labels) in enumerate(loader):
            rate = self.rate(epoch - 1 + step / len(loader))
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            image, labels = (part.to(self.team.device, non_blocking=True) for part in (image, labels))
            with torch.autocast(self.team.device.type, enabled=self.half):
                logits = network(image)
            terms = self.loss.terms(logits, labels)
            self.optimizer.zero_grad(set_to_none=True)
            scaled: Any = self.scaler.scale(terms.total)
            scaled.backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            sums += torch.stack([term.detach().double() for term in terms])
        self.team.agree(self.network)
        total, dice, ce, ace = self.team.mean(sums / len(loader)).tolist()
        if not math.isfinite(total):
            raise SegcalError(
                f"the loss must stay finite; it became {total} in epoch {epoch}. "
                + (f"The checkpoint of epoch {epoch - 1} stands. " if epoch > 1 else "")
                + "Lower training.learning_rate, or look at the images."
            )
        seconds = time.perf_counter() - start
        return {
            "epoch": epoch, "learning_rate": rate, "loss": total, "dice_loss": dice, "ce_loss": ce, "ace_loss": ace,
            "seconds": round(seconds, 3),
        }  # fmt: skip

    def _prepare(self, tell: Callable[[str], None]) -> None:
        """Make the images ready that are not, and say where they are."""
        cases = [*self.cases, *self.validation]
        own = self.team.share(cases)
        for i, case in enumerate(own, start=1):
            tell(f"preparing image {i} of {len(own)}")
            self.store.get(case)
        self.team.wait()
        if self.team.first:
            size = self.store.size(cases) / 1e6
            shown = f"{size / 1e3:.1f} GB" if size >= 1e3 else f"{size:.1f} MB"
            self.say(f"the prepared images of {len(cases)} cases take {shown} in {self.store.folder}; runs share them")

    def rate(self, epoch: float) -> float:
        """Learning rate after so many epochs: a linear warm-up, then half a cosine down to zero."""
        training = self.config.training
        assert training.epochs is not None
        warmup = min(training.warmup_epochs, training.epochs / 2)
        if epoch < warmup:
            return self._peak_rate * (training.warmup_start + (1 - training.warmup_start) * epoch / warmup)
        return self._peak_rate * 0.5 * (1 + math.cos(math.pi * (epoch - warmup) / (training.epochs - warmup)))

    def _validate(self, epoch: int) -> dict[str, float]:
        """Return means over validation cases and classes, and save the network if its Dice is the best so far."""
        evaluation = evaluate_prepared(self.network, self.validation, self.store, self.dataset, self.config, self.team)
        values = evaluation.case_values()
        row = {metric: values[None, metric].nanmean().item() for metric in ("dice", "ace", "ece", "mce")}
        if not self.best_epoch or row["dice"] > self.best_dice:
            self.best_epoch, self.best_dice = epoch, -math.inf if math.isnan(row["dice"]) else row["dice"]
            if self.team.first:
                content = {"network": self.network.state_dict(), "epoch": epoch, "dice": row["dice"]}
                save_checkpoint(self.folder / BEST, content | {"config": self.config.hash})
        return row

    def _save(self, epoch: int) -> None:
        content = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "epoch": epoch,
            "best_epoch": self.best_epoch,
            "best_dice": self.best_dice,
            "log": self.log.rows,
            "config": self.config.hash,
        }
        save_checkpoint(self.folder / LAST, content)

    def _resume(self) -> int:
        """Take up the last checkpoint, if there is one; the epochs done."""
        path = self.folder / LAST
        # Read to the CPU; each process brings it to its own device.
        content = self.team.from_first(lambda: load_checkpoint(path) if path.exists() else None)
        if content is None:
            return 0
        try:
            self.network.load_state_dict(content["network"])
            self.optimizer.load_state_dict(content["optimizer"])
            self.scaler.load_state_dict(content["scaler"])
            self.best_epoch, self.best_dice = content["best_epoch"], content["best_dice"]
            self.log.rows = content["log"]
            done = int(content["epoch"])
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            raise FileError(
                f"{path} must be the last checkpoint of a run; {str(error).splitlines()[0]}."
                " Use another --out or remove the file."
            ) from error
        if self.team.first:
            self.log.write()  # it may have been killed between the two
        return done
