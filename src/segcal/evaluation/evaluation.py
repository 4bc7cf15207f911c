"""What one evaluation found: sums of every case and class, their names, and where they came from.

Everything shown later (tables, diagrams, tests, reports) follows from these sums; the volumes are not read again.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from segcal._io.files import read_npz, reject_pipe, write_npz, write_whole
from segcal._io.words import counted
from segcal.binning import Binning
from segcal.decisions import DecisionSums, dice_of_sums
from segcal.errors import ConfigError, FileError, SegcalError, ShapeError, check_integer, distinct
from segcal.evaluation.columns import JOINT, Label, scope_of
from segcal.evaluation.fine import (
    HELD,
    FineStatistics,
    case_errors,
    concatenate,
    decision_numbers,
    packed_pieces,
)
from segcal.evaluation.micro import MicroSums, drawn, proper
from segcal.metrics import ace, ece, mce
from segcal.scores import OverlapCounts, ScoreSums, concatenate_sums, dice, map_sums
from segcal.statistics import BinStatistics

FORMAT = "segcal evaluation 3"
PACKED = {"statistics": "statistics_sizes", "top_label": "top_label_sizes"}
"""Of a file, the arrays of packed sums, and those that tell how many bytes each case has."""


class Row(NamedTuple):
    """One number of a summary. For macro averages `std` is that over cases and `cases` their number."""

    cases: str  # "all", or "complete": those with every trained label
    average: str  # "macro", "micro paper" or "micro pooled"
    scope: str  # see `scope_of`
    label: Label
    metric: str
    value: float
    std: float
    number: int


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Sums per case and class, in fine hard bins, with the names of cases and classes.

    `evaluate` makes one from files. Sums that do not fit the names are a ShapeError, names that are not distinct a
    ConfigError.

    statistics: bin statistics, (case, class, fine bin).
    overlap: counts for Dice, (case, class).
    cases, classes: their names, in the order of the sums.
    provenance: what the numbers came from, as JSON has it: versions, options, files.

    >>> from segcal import bin_statistics
    >>> probabilities, labels = torch.tensor([[[0.9, 0.2], [0.1, 0.8]]]), torch.tensor([[0, 0]])
    >>> evaluation = Evaluation(
    ...     statistics=bin_statistics(probabilities, labels, bins=1200),
    ...     overlap=OverlapCounts.of_classes(probabilities, labels),
    ...     scores=ScoreSums.of_classes(probabilities, labels),
    ...     top_label=None,
    ...     cases=("patient 1",),
    ...     classes=("background", "liver"),
    ...     has_background=True,
    ... )
    >>> evaluation.foreground().case_metrics()["ace"]
    tensor([[0.4500]], dtype=torch.float64)
    """

    statistics: BinStatistics
    overlap: OverlapCounts
    scores: ScoreSums
    """Of each class against the rest."""
    top_label: BinStatistics | None
    """Of the most probable class of each voxel (one column): its probability, and whether it is right."""
    cases: tuple[str, ...]
    classes: tuple[str, ...]
    has_background: bool = False
    """Whether one of the classes is the background, which results leave out unless asked for."""
    bins: int = 20
    """Bins of the errors that are reported."""
    provenance: dict[str, Any] = field(default_factory=dict)
    joint: ScoreSums | None = None
    """(case, 1), of the distribution over all classes; where classes overlap, the mean over them. None: not known."""
    label_counts: Tensor | None = None
    """(case, label): voxels of each trained label but the background, where classes are unions of labels."""
    decisions: DecisionSums | None = None
    """Of the voxels decided for each class; None: not known."""
    background_index: int = 0
    """The place of the background among the classes, if there is one."""

    def __post_init__(self) -> None:
        shape = (len(self.cases), len(self.classes))
        sums = self.statistics
        for name, came in (("statistics", (sums.cases, sums.classes)), ("overlap", self.overlap.true.shape)):
            if tuple(came) != shape:
                raise ShapeError(
                    f"{name} must be of {shape[0]} cases and {shape[1]} classes; got {tuple(came)}."
                    " Build all sums from the same cases and classes."
                )
        if len(set(self.cases)) != len(self.cases):
            raise ConfigError(f"case names must differ; {_twice(self.cases)} came more than once.")
        distinct("class names", self.classes)
        object.__setattr__(self, "bins", check_integer("bins", self.bins))
        if self.has_background and self.background_index not in range(len(self.classes)):
            raise ConfigError(
                f"background_index must be the place of one of the {len(self.classes)} classes; got "
                f"{self.background_index!r}."
            )

    def select(self, *, cases: Sequence[int] | None = None, classes: Sequence[int] | None = None) -> Evaluation:
        """Only these cases and classes, by index."""
        rows = list(range(len(self.cases))) if cases is None else list(cases)
        columns = list(range(len(self.classes))) if classes is None else list(classes)

        def cut(sums: Tensor) -> Tensor:
            return sums[rows][:, columns]

        statistics = self.statistics.select(cases=rows, classes=columns)
        places = [range(len(self.classes))[i] for i in columns]  # of negative indices, too
        has_background = self.has_background and self.background_index in places
        return replace(
            self,
            statistics=statistics,
            overlap=map_sums(cut, self.overlap),
            scores=map_sums(cut, self.scores),
            top_label=self.top_label and self.top_label.select(cases=rows),
            joint=self.joint and map_sums(lambda sums: sums[rows], self.joint),
            decisions=self.decisions and map_sums(cut, self.decisions),
            label_counts=None if self.label_counts is None else self.label_counts[rows],
            cases=tuple(self.cases[i] for i in rows),
            classes=tuple(self.classes[i] for i in columns),
            has_background=has_background,
            background_index=places.index(self.background_index) if has_background else 0,
        )

    @property
    def raters(self) -> int:
        """How many raters labeled a case, on average over cases; 1 where nothing is said of raters."""
        told = self.provenance.get("raters")
        numbers = [row.get("value") for row in told if row.get("metric") == "raters"] if isinstance(told, list) else []
        return max(1, round(numbers[0])) if numbers and isinstance(numbers[0], int | float) else 1

    def foreground(self) -> Evaluation:
        """Without the background, if there is one."""
        if not self.has_background:
            return self
        return self.select(classes=[i for i in range(len(self.classes)) if i != self.background_index])

    def complete(self) -> Evaluation:
        """Only the cases in which every trained label (but the background) is present.

        Of regions these are the labels that they are unions of, where the label maps told them.
        """
        true = self.foreground().overlap.true if self.label_counts is None else self.label_counts
        whole = (true > 0).all(1)
        return self if bool(whole.all()) else self.select(cases=whole.nonzero().flatten().tolist())

    @staticmethod
    def concatenate(parts: Iterable[Evaluation]) -> Evaluation:
        """The cases of all parts, which must agree in classes and bins.

        Provenance is that of all parts: files, failures and notes together; whatever else differs, one after the other
        under "parts".
        """
        parts = list(parts)
        if not parts:
            raise ShapeError("there must be at least one evaluation to concatenate; got none. Pass at least one.")
        first = parts[0]
        for part in parts[1:]:
            if (part.classes, part.bins) != (first.classes, first.bins):
                raise ConfigError(
                    f"evaluations must have the same classes and bins; got {first.classes} with {first.bins} bins and "
                    f"{part.classes} with {part.bins}."
                )
            if (part.has_background, part.background_index) != (first.has_background, first.background_index):
                raise ConfigError(
                    "evaluations must have the same background; got different values of has_background or "
                    "background_index. Call foreground() on each of them first."
                )
        tops = [part.top_label for part in parts if part.top_label is not None]
        joints = [part.joint for part in parts if part.joint is not None]
        decisions = [part.decisions for part in parts if part.decisions is not None]
        counts = [part.label_counts for part in parts if part.label_counts is not None]
        return replace(
            first,
            statistics=concatenate(part.statistics for part in parts),
            overlap=concatenate_sums([part.overlap for part in parts]),
            scores=concatenate_sums([part.scores for part in parts]),
            top_label=concatenate(tops) if len(tops) == len(parts) else None,
            joint=concatenate_sums(joints) if len(joints) == len(parts) else None,
            decisions=concatenate_sums(decisions) if len(decisions) == len(parts) else None,
            label_counts=torch.cat(counts) if len(counts) == len(parts) else None,
            cases=tuple(name for part in parts for name in part.cases),
            provenance=_joined([part.provenance for part in parts]),
        )

    @property
    def binned(self) -> BinStatistics:
        """The statistics in the bins that are reported."""
        return self.statistics.rebin(self.bins)

    def case_metrics(self) -> dict[str, Tensor]:
        """Every metric by name, (case, class), with NaN where it has no value."""
        return {"dice": dice(self.overlap)} | case_errors(self.statistics, self.bins) | proper(self.scores)

    def decision_metrics(self) -> dict[str, Tensor]:
        """What the decisions of each case promise, (case, class), and volumes in ml; empty where they are not known.

        Expected numbers come from the probabilities alone. Volumes are NaN where the size of a voxel is not known.
        Uncertain is the volume of voxels whose probability of the class lies between 0.1 and 0.9.
        """
        if self.decisions is None:
            return {}
        voxel_ml, found = self.decisions.voxel_ml, decision_numbers(self.statistics, self.bins)
        return {
            "expected_dice": dice_of_sums(found["expected"], self.overlap, self.decisions),
            "volume_ml": self.overlap.predicted * voxel_ml,
            "expected_volume_ml": found["expected"] * voxel_ml,
            "true_volume_ml": self.overlap.true * voxel_ml,
            "uncertain_volume_ml": found["uncertain"] * voxel_ml,
        }

    def top_label_errors(self) -> dict[str, Tensor]:
        """Calibration errors of the most probable class, per case; empty for regions."""
        if self.top_label is None:
            return {}
        stats = self.top_label.rebin(self.bins)
        return {f"top_label_{name}": metric(stats)[:, 0] for name, metric in (("ece", ece), ("ace", ace), ("mce", mce))}

    def joint_scores(self) -> dict[str, Tensor]:
        """Brier score and NLL of the whole distribution, per case; NaN where they are not known."""
        if self.joint is None:
            return dict.fromkeys(JOINT, torch.full((len(self.cases),), torch.nan, dtype=torch.float64))
        return {name: values[:, 0] for name, values in proper(self.joint).items()}

    def case_values(self, *, background: bool = False) -> dict[tuple[Label, str], Tensor]:
        """Each metric of each case, by (label, metric); the background is no class here unless asked for."""
        if not background and self.has_background:
            return self.foreground().case_values()
        values: dict[tuple[Label, str], Tensor] = {}
        for metric, columns in self.case_metrics().items():
            values |= {(name, metric): column for name, column in zip(self.classes, columns.unbind(1), strict=True)}
            values[None, metric] = columns.nanmean(1)
        whole = self.joint_scores() | self.top_label_errors()
        return values | {(None, metric): column for metric, column in whole.items()}

    def micro_values(
        self, weights: Tensor | None = None, *, background: bool = False
    ) -> dict[tuple[str, Label, str], Tensor]:
        """Micro averages by (average, label, metric): one number, or one for each draw of `weights`, (draw, case)."""
        if not background and self.has_background:
            return self.foreground().micro_values(weights)
        sums = MicroSums(self)
        return sums.values(sums.total if weights is None else drawn(weights, sums.of_cases))

    def summary(self, *, background: bool = False) -> list[Row]:
        """Macro mean and standard deviation, and both micro averages, over all and over complete cases.

        background: Whether the background is a class among others: it has rows, and counts in means over classes.
        """
        rows = []
        for which, part in (("all", self), ("complete", self.complete())):
            values = part.case_values(background=background)
            rows += [_macro_row(which, *key, column) for key, column in values.items()]
            if part.cases:
                rows += [
                    Row(
                        *(which, average, scope_of(label, metric), label, metric),
                        value=value.item(),
                        std=math.nan,
                        number=len(part.cases),
                    )
                    for (average, label, metric), value in part.micro_values(background=background).items()
                ]
        return rows

    def means(self, *, cases: str = "all") -> dict[tuple[str, str], float]:
        """Of all classes, without the background in means over them, by (average, metric); all or complete cases."""
        return {
            (row.average, row.metric): row.value for row in self.summary() if (row.cases, row.label) == (cases, None)
        }

    def __repr__(self) -> str:
        """One line, rather than pages of sums."""
        return f"Evaluation({counted(len(self.cases), 'case')}; {', '.join(self.classes)}; {counted(self.bins, 'bin')})"

    def _repr_html_(self) -> str:
        """Its summary, in a notebook."""
        from segcal.evaluation.tables import summary_table, to_html

        return to_html(summary_table(self))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write PATH (.npz, no pickle) and beside it a .json with names and provenance to read."""
        path = Path(path)
        kinds: dict[str, tuple[str, ...]] = {"overlap": OverlapCounts.names(), "scores": ScoreSums.names()}
        if self.joint is not None:
            kinds["joint"] = ScoreSums.names()
        if self.decisions is not None:
            kinds["decisions"] = DecisionSums.names()
        arrays = {
            f"{kind}_{name}": getattr(getattr(self, kind), name).numpy()
            for kind, names in kinds.items()
            for name in names
        }
        if self.label_counts is not None:
            arrays["label_counts"] = self.label_counts.numpy()
        packed = {"statistics": packed_pieces(self.statistics)}
        if self.top_label is not None:
            packed["top_label"] = packed_pieces(self.top_label)
        for name, pieces in packed.items():
            arrays[PACKED[name]] = np.array([piece.size for piece in pieces], np.int64)
        header = {
            "format": FORMAT,
            "cases": self.cases,
            "classes": self.classes,
            "has_background": self.has_background,
            "background_index": self.background_index,
            "bins": self.bins,
            "fine_bins": self.statistics.binning.bins,
            "top_label": self.top_label is not None,
            "provenance": self.provenance,
        }
        write_whole(path.with_suffix(".json"), write_npz(path, header, arrays, packed=packed).encode())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Evaluation:
        """Read what `save` wrote; SegcalError for another file, those of segcal 0.1 and 0.2 included."""
        header, arrays = read_npz(
            path, kind=FORMAT, packed=PACKED, remedy="Run `segcal evaluate` again with this version"
        )
        try:
            pieces = {name: arrays.pop(name) for name in PACKED if isinstance(arrays.get(name), list)}
            tensors = {name: _sums(name, array) for name, array in arrays.items()}
            binning = Binning(int(header["fine_bins"]))

            def fine(kind: str, classes: int) -> BinStatistics:
                return _checked(FineStatistics.packed(pieces[kind], classes, binning))

            return Evaluation(
                statistics=fine("statistics", len(header["classes"])),
                overlap=OverlapCounts(**{name: tensors[f"overlap_{name}"] for name in OverlapCounts.names()}),
                scores=_scores(tensors, "scores"),
                top_label=fine("top_label", 1) if header["top_label"] else None,
                cases=_names(header["cases"]),
                classes=_names(header["classes"]),
                has_background=bool(header["has_background"]),
                background_index=int(header.get("background_index", 0)),
                bins=int(header["bins"]),
                provenance=header["provenance"],
                joint=_scores(tensors, "joint") if "joint_voxels" in tensors else None,
                decisions=DecisionSums(**{name: tensors[f"decisions_{name}"] for name in DecisionSums.names()})
                if "decisions_confidence" in tensors
                else None,
                label_counts=tensors.get("label_counts"),
            )
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, OverflowError, SegcalError) as error:
            raise SegcalError(
                f"{path} must hold the sums of an evaluation; {str(error).rstrip('.')}. Run `segcal evaluate` again."
            ) from error


def _joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The provenance of several parts as one."""
    joined = {name: value for name, value in parts[0].items() if all(part.get(name) == value for part in parts)}
    apart = [{name: value for name, value in part.items() if name not in joined} for part in parts]
    files = [part.pop("files") for part in apart if "files" in part]
    if files:
        joined["files"] = {case: stamps for each in files for case, stamps in each.items()}
    for name in ("failures", "notes"):
        told = [part.pop(name) for part in apart if name in part]
        if told:
            joined[name] = [one for each in told for one in each]
    return joined | ({"parts": apart} if any(apart) else {})


def _scores(tensors: dict[str, Tensor], kind: str) -> ScoreSums:
    return ScoreSums(**{name: tensors[f"{kind}_{name}"] for name in ScoreSums.names()})


def _twice(names: Sequence[str]) -> str:
    return ", ".join(sorted(name for name, number in Counter(names).items() if number > 1))


def _macro_row(which: str, name: Label, metric: str, values: Tensor) -> Row:
    known = values[~values.isnan()]
    number = len(known)
    std = known.std().item() if number > 1 else math.nan
    return Row(
        which, "macro", scope_of(name, metric), name, metric, known.mean().item() if number else math.nan, std, number
    )


def _sums(name: str, array: np.ndarray[Any, Any]) -> Tensor:
    """An array of a file as float64 sums. Scores may be infinite, or below 0 by rounding; others may not."""
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{name} must be real numbers; they are {array.dtype}")
    sums = array.astype(np.float64)
    if not name.startswith(("scores", "joint", "decisions")) and not ((sums >= 0) & (sums < 2**60)).all():
        raise ValueError(f"{name} must be finite numbers of at least 0")
    return torch.from_numpy(sums)


def _names(names: object) -> tuple[str, ...]:
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"names must be a list of texts; got {names!r}")
    return tuple(names)


def _checked(stats: FineStatistics) -> FineStatistics:
    """The same; what is small is unpacked at once, and refused where it makes no sense. Else that waits for its use."""
    if stats.cases * stats.classes * stats.binning.bins <= HELD:
        stats.unpacked()
    return stats


def read_evaluations(sources: Sequence[str | os.PathLike[str]]) -> dict[str, Evaluation]:
    """Saved evaluations by name. A source is a folder that `segcal evaluate` wrote, an .npz file, or NAME=either.

    Without a name it is that of the folder; where two are the same, the folder above comes before it.
    """
    found = [named_path(str(source)) for source in sources]
    files = [path / "evaluation.npz" if path.is_dir() else path for _, path in found]
    names = method_names(found)
    return {name: Evaluation.load(_existing(file)) for name, file in zip(names, files, strict=True)}


def method_names(sources: Sequence[tuple[str, Path]]) -> list[str]:
    """Return the names of results: those given, or else those of the folders or .npz files.

    Where two are the same, up to two folders above come before them.

    Raises:
        ConfigError: If two names are the same all the same.
    """
    for depth in range(1, 4):
        names = [
            name or "/".join(Path(os.path.abspath(path)).parts[-depth:]).removesuffix(".npz") for name, path in sources
        ]
        if len(set(names)) == len(names):
            return names
    raise ConfigError(f"results must have different names; got {_twice(names)} more than once. Give NAME=PATH.")


def named_path(source: str) -> tuple[str, Path]:
    """The name before an equals sign, if any, and the path, without the file's name that all share."""
    name, equals, rest = source.partition("=")
    path = Path(rest) if equals and not Path(source).exists() else Path(source)
    return name if path != Path(source) else "", path.parent if path.name == "evaluation.npz" else path


def _existing(file: Path) -> Path:
    reject_pipe(file)
    if not file.is_file():
        raise FileError(
            f"an evaluation must be a folder with evaluation.npz, or an .npz file; {file} does not exist."
            " Run `segcal evaluate` first."
        )
    return file
