"""A Lightning callback that logs calibration errors and reliability diagrams of validation and test cases.

    from segcal.adapters.lightning import CalibrationMonitor

    Trainer(callbacks=[CalibrationMonitor(activation="softmax")])

`validation_step` returns `{"logits": logits, "labels": labels}`. The callback keeps three sums for each case, class and
bin, so that errors are those of the whole set of cases, however it is cut into batches and dealt to processes.
Losses need no adapter: `segcal.SegmentationLoss` is a module as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, get_args

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from torch import Tensor

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:  # the same package under its older name
    from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[import-not-found]

from segcal.binning import Binning
from segcal.collect import Activation, activated, bin_statistics
from segcal.errors import ConfigError, LabelError, ShapeError, distinct, one_of
from segcal.evaluation.diagrams import reliability
from segcal.metrics import ERRORS, MicroReading, micro
from segcal.plots.reliability import reliability_grid
from segcal.plots.style import COLUMN_IN, PAGE_IN, SCREEN_DPI, default_settings, new_figure
from segcal.statistics import BinStatistics
from segcal.training.distributed import Processes

_COLUMNS = 4  # of diagrams beside each other

_Batch = tuple[list[Hashable] | None, BinStatistics]  # names of its cases, if they have any


class CalibrationMonitor(Callback):
    """Logs `val_ace`, `val_ece`, `val_mce` as micro averages and, as `val_ace_macro` and so on, as means over cases.

    All are means over classes, without the background. Under `trainer.test` names begin with `test`. The sanity check
    is not counted. After an epoch `statistics` has the sums of all cases and classes, `cases` their names.

    A step returns a dict with `logits` (`probabilities` for activation="none") and `labels`, as `bin_statistics`
    takes them; it may hold a `mask`, and in `cases` a name for each case of the batch. A name counts once, whichever
    processes saw it: Lightning deals some cases twice where their number cannot be divided by that of processes. So
    several processes need names. A step that returns something else is a ConfigError in the first batch.

    activation: "softmax", "sigmoid" or "none", which says what the step returns.
    bins: number of hard bins; 20 if neither this nor a binning is given.
    binning: bins and kernel, in place of `bins`.
    class_names: of all classes, the background's included. Then each class is logged, too, as `val_ace_liver`.
    background: whether the first class counts. If not given, that of a softmax does not, and a sigmoid has none; with
        activation="none" it must be given.
    micro: "pooled" adds the voxels of all cases; "paper" takes the mean over cases as the confidence of a bin.
    ignore_index: voxels with this label are left out.
    read: a function of what the step returned and its batch that makes the dict above.
    loader: which validation loader is seen, where there are several. Another monitor may see the next.
    prefix: before all names that are logged; must differ between monitors.
    diagram_every: reliability diagrams, one of each class, go to loggers that take images, every so many validations;
        0 for never.
    """

    statistics: BinStatistics | None = None
    cases: tuple[Hashable, ...] | None = None

    def __init__(
        self,
        *,
        activation: Activation,
        bins: int | None = None,
        binning: Binning | None = None,
        class_names: Sequence[str] | None = None,
        background: bool | None = None,
        micro: MicroReading = "pooled",
        ignore_index: int | None = None,
        read: Callable[[Any, Any], Any] | None = None,
        loader: int = 0,
        prefix: str = "",
        diagram_every: int = 1,
    ) -> None:
        one_of("activation", activation, get_args(Activation))
        one_of("micro", micro, get_args(MicroReading))
        if bins is not None and binning is not None:
            raise ConfigError(
                "bins and binning must not be given together; got both. Use Binning(bins=..., kernel=...) alone."
            )
        if background is None and activation == "none":
            raise ConfigError(
                "background must be given with activation='none'; got none. Set True if the first class counts."
            )
        self.activation, self.micro, self.ignore_index, self.read = activation, micro, ignore_index, read
        self.binning = binning or Binning(20 if bins is None else bins)
        self.class_names = None if class_names is None else tuple(class_names)
        distinct("class_names", self.class_names or ())
        self.first_class = int(activation == "softmax" if background is None else not background)
        self.loader, self.prefix, self.diagram_every = loader, prefix, diagram_every
        self._batches: list[_Batch] = []
        self._epochs = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        alike = [each for each in trainer.callbacks if isinstance(each, CalibrationMonitor)]
        if sum(each.prefix == self.prefix for each in alike) > 1:
            raise ConfigError(
                f"each CalibrationMonitor must have a prefix of its own; several have {self.prefix!r}. Their values "
                f"would be mixed under the same names."
            )

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._batches = []

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if dataloader_idx == self.loader:
            step = "test_step" if trainer.testing else "validation_step"
            self._batches.append(self._collect(outputs, batch, step, trainer.world_size))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._finish(trainer, pl_module, f"{self.prefix}{'test' if trainer.testing else 'val'}")

    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end

    def _collect(self, outputs: Any, batch: Any, step: str, processes: int) -> _Batch:
        """The sums of a batch; also in the sanity check, which so finds a wrong step before the training."""
        found = outputs if self.read is None else self.read(outputs, batch)
        key = "probabilities" if self.activation == "none" else "logits"
        if not isinstance(found, Mapping) or not all(isinstance(found.get(name), Tensor) for name in (key, "labels")):
            raise ConfigError(
                f"{step} must return a dict with the tensors {key!r} and 'labels' for activation={self.activation!r}; "
                f"got {_described(found)}. Return them, or give CalibrationMonitor a `read` that makes such a dict."
            )
        stats = bin_statistics(
            activated(found[key].detach(), self.activation),
            found["labels"],
            binning=self.binning,
            mask=found.get("mask"),
            ignore_index=self.ignore_index,
        ).to("cpu")
        self._check_classes(stats.classes)
        return _names(found.get("cases"), stats.cases, processes), stats

    def _check_classes(self, classes: int) -> None:
        if classes <= self.first_class:
            raise ShapeError(
                "there must be a class besides the background; got one class. If it is the foreground's, that is "
                "activation='sigmoid', or background=True."
            )
        if self.class_names is not None and len(self.class_names) != classes:
            raise ShapeError(
                f"class_names must have one name per class, the background's included; got {len(self.class_names)} for "
                f"{classes} classes."
                " Name every class."
            )

    def _finish(self, trainer: Trainer, module: LightningModule, prefix: str) -> None:
        """Put together what all processes have, and log it."""
        team = Processes(trainer.global_rank, trainer.world_size, module.device)
        batches = [batch for share in team.gather(self._batches) for batch in share]
        if not batches:
            return
        with torch.inference_mode(False):  # or the sums could not be used everywhere afterwards
            self.statistics, self.cases = _each_once(batches)
        counted = range(self.first_class, self.statistics.classes)
        shown = self.statistics.select(classes=counted)
        names = None if self.class_names is None else [self.class_names[i] for i in counted]
        values = _values(shown, names, self.micro)
        # All processes have the same values; their mean is what Lightning wants to hear of.
        module.log_dict({f"{prefix}_{name}": value for name, value in values.items()}, sync_dist=True)
        if trainer.is_global_zero and self.diagram_every and self._epochs % self.diagram_every == 0:
            _log_diagram(trainer, f"{prefix}_reliability", shown, names or [f"class {i}" for i in counted])
        self._epochs += 1


def _described(found: Any) -> str:
    if not isinstance(found, Mapping):
        return "nothing" if found is None else f"a {type(found).__name__}"
    return "a dict of " + (", ".join(f"{key} ({type(value).__name__})" for key, value in found.items()) or "nothing")


def _names(given: Any, cases: int, processes: int) -> list[Hashable] | None:
    """The names of a batch's cases, which there must be where several processes may have seen the same one."""
    if given is None:
        if processes > 1:
            raise ConfigError(
                f"cases must have names on {processes} processes, since some may be dealt twice to give all "
                f"processes equally many; got none. Return a list of names or numbers as 'cases', one for each case of "
                f"the batch."
            )
        return None
    names = given.tolist() if isinstance(given, Tensor) else list(given)
    if len(names) != cases:
        raise ShapeError(
            f"'cases' must have one name for each case of the batch ({cases}); got {len(names)}."
            " Return one name per case."
        )
    return names


def _each_once(batches: Sequence[_Batch]) -> tuple[BinStatistics, tuple[Hashable, ...] | None]:
    """The cases of all batches and their names; one that came again is left out."""
    stats = BinStatistics.concatenate(part for _, part in batches)
    if any(names is None for names, _ in batches):
        return stats, None
    totals = torch.stack([stats.count.sum(-1), stats.label_sum.sum(-1)])  # these do not depend on the network
    rows: dict[Hashable, int] = {}
    for row, name in enumerate(name for names, _ in batches for name in names or ()):
        first = rows.setdefault(name, row)
        if not torch.allclose(totals[:, row], totals[:, first]):
            raise LabelError(
                f"a name must always mean the same case; {name!r} came with different labels. Slices or patches of "
                f"a case need names of their own."
            )
    return stats.select(cases=list(rows.values())), tuple(rows)


def _values(stats: BinStatistics, names: Sequence[str] | None, reading: MicroReading) -> dict[str, float]:
    """Micro averages and means over cases: the mean over classes, and each class that has a name."""
    values, together = {}, micro(stats, reading=reading)
    for metric, error in ERRORS.items():
        for name, errors in ((metric, error(together)), (f"{metric}_macro", error(stats))):
            values[name] = errors.nanmean().item()
            for label, column in zip(names or (), errors.unbind(1), strict=False):
                values[f"{name}_{label}"] = column.nanmean().item()
    return values


def _log_diagram(trainer: Trainer, name: str, stats: BinStatistics, names: Sequence[str]) -> None:
    """Draw a reliability diagram of each class for every logger that takes images."""
    boards = [logger.experiment for logger in trainer.loggers if hasattr(logger.experiment, "add_image")]
    others = [logger for logger in trainer.loggers if hasattr(logger, "log_image")]
    if not boards and not others:
        return
    image = _diagram(stats, names)
    for board in boards:  # TensorBoard
        board.add_image(name, image, trainer.global_step, dataformats="HWC")
    for logger in others:  # Weights & Biases and those that took over its method
        logger.log_image(name, [image], step=trainer.global_step)


def _diagram(stats: BinStatistics, names: Sequence[str]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Reliability diagrams as an image, (height, width, RGB)."""
    diagrams = {name: reliability(stats.select(classes=[i])) for i, name in enumerate(names)}
    columns = min(_COLUMNS, len(diagrams))
    rows = -(-len(diagrams) // columns)
    with default_settings():
        figure = new_figure(max(COLUMN_IN, PAGE_IN * columns / _COLUMNS), 0.6 + rows * (2.4 if columns > 1 else 3.7))
        reliability_grid(figure, diagrams, columns=columns)
        figure.set_dpi(SCREEN_DPI)
        canvas: Any = FigureCanvasAgg(figure)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()
