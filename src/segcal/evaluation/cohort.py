"""Evaluate a folder of predictions against a folder of labels: one case at a time, in bounded memory, resumable.

Each case's sums are written to a file of their own as soon as they are there. Started again, cases whose files
and options have not changed are not read again; the results are the same as those of one undisturbed run.
Workers are processes of their own that do without torch.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from segcal import __version__
from segcal._io.ending import import_whole
from segcal._io.files import real_path, stay_outside, text_path
from segcal._io.jobs import (
    Executor,
    Failure,
    Job,
    Pool,
    do_all,
    keep_only,
    key_of,
    open_parts,
    stamp,
    threads_of,
    unchanged,
)
from segcal.errors import ConfigError, one_of
from segcal.evaluation.bands import check_bands
from segcal.evaluation.facets import all_files, are_whole, save_measured
from segcal.evaluation.measure import measure_case
from segcal.evaluation.naming import check_names, check_same_names, read_naming, read_shared_naming
from segcal.evaluation.options import Options, ReadOptions
from segcal.evaluation.outcome import Outcome, gather_notes, outcome_of
from segcal.evaluation.results import stack_cases, stack_facets, write_results
from segcal.evaluation.sums import CaseSums
from segcal.volumes import CaseFiles, Pairing, pair_cases
from segcal.volumes.averaging import MEANS, Averaging, Mean
from segcal.volumes.mismatch import why_nothing_pairs
from segcal.volumes.pairing import pair_raters, rated

if TYPE_CHECKING:
    from segcal.evaluation.groups import Groups

Progress = Callable[[int, int], None]
RatersFrom = Literal["folders", "files", "channels"]
RATERS_FROM: tuple[RatersFrom, ...] = get_args(RatersFrom)
_UNPORTABLE = re.compile(r'[\x00-\x1f\x7f-\x9f\ud800-\udfff<>:"/\\|?*]|[. ]+\Z')  # what names on Windows cannot hold
_MOST_BYTES = 255  # of the name of a folder


def evaluate(
    predictions: str | os.PathLike[str],
    labels: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    raters_from: RatersFrom = "folders",
    members: Sequence[str | os.PathLike[str]] = (),
    mean: Mean = "probabilities",
    options: ReadOptions | None = None,
    bins: int = 20,
    background: bool = False,
    calibrator: str | os.PathLike[str] | None = None,
    groups: str | os.PathLike[str] | None = None,
    patients: str | None = None,
    bands: Sequence[float] = (),
    workers: int = 1,
    executor: Executor | None = None,
    progress: Progress = lambda done, total: None,
) -> Outcome:
    """Evaluate every case that both folders have, and write the results to `out`.

    Writes cases.csv, summary.csv, summary.json, evaluation.npz (with .json) and failures.csv, in the place of those
    that are there; where no case could be measured, failures.csv alone. A case that cannot be read or makes no sense
    is a failure with a sentence; it does not stop the others. An interrupted call resumes when repeated. Raises
    ConfigError where options contradict each other or the files, and where no prediction has a label map.

    predictions: Folder of probability maps, or one file: NIfTI, .npy, or .npz as nnU-Net writes it.
    labels: Folder of label maps, or one file. Files belong together by their names. Several are the label maps of
        several raters, who may miss cases: what is measured then is calibration against the mean of the raters, and
        raters.csv, raters_summary.csv and the folder raters/ have the rest.
    raters_from: Where the label maps of several raters are: "folders", one for each; "files", all in one folder, named
        by case and rater, as case_rater1.nii.gz; "channels" of each label file.
    out: Folder for the results. It must lie outside of the others.
    members: Further folders of maps of the same cases, or files: what is measured is the mean of all.
    mean: Of the members' probabilities, or of their logits.
    options: How to read the predictions: logits, overlapping classes, names, regions, the label to ignore.
    bins: Bins of the calibration errors that are reported.
    background: Report the background class, too.
    calibrator: File of a calibrator. Predictions are measured as it makes them; no map is stored.
    groups: A .csv file of groups of cases, as `compare_groups` takes it: group_summary.csv and group_gaps.csv have
        every metric of each group, and how far groups lie apart.
    patients: Which cases belong together, as in `compare`; for groups alone.
    bands: Distances in mm to the predicted boundary of a class, as (2, 5), that divide its voxels into bands: the
        folders in bands/ are evaluations of their own.
    workers: Processes, each with one case at a time.
    executor: Measures cases elsewhere, in place of the workers, as `segcal.adapters.dask.DaskCluster`.
    progress: Called with the number of cases that are done, and of all.

    >>> import tempfile, numpy as np
    >>> from pathlib import Path
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "maps").mkdir(), (folder / "labels").mkdir()
    (None, None)
    >>> np.save(folder / "maps" / "case_1.npy", np.full((2, 4, 4, 4), 0.5, np.float32))  # class, x, y, z
    >>> np.save(folder / "labels" / "case_1.npy", np.zeros((4, 4, 4), np.uint8))
    >>> evaluate(folder / "maps", folder / "labels", folder / "results").evaluation
    Evaluation(1 case; class 0, class 1; 20 bins)
    """
    brings_torch = partial(import_whole, "segcal.evaluation.evaluation")  # in seconds, which workers do without
    pool = Pool(workers, preload="segcal.evaluation.ready", meanwhile=brings_torch)
    out = Path(out)
    drawn = label_folders(labels)
    for what, sources in (("labels", drawn), ("predictions", (predictions, *members))):
        for source in sources:
            stay_outside(out, Path(source), what)
    meant, pairing = open_cohort(
        predictions, labels, options or ReadOptions(), members=members, mean=mean, bins=bins, background=background,
        calibrator=calibrator, raters_from=raters_from,
    )  # fmt: skip
    if bands:
        if any(files.raters or files.rater_channels for files in pairing.cases):
            raise ConfigError("--bands needs the labels of one rater; got several. Give one folder of labels.")
        meant = replace(meant, bands=check_bands(bands))
    if groups is None and patients is not None:
        raise ConfigError("--patients must be used with --groups; got --patients alone. Add --groups.")
    told = None if groups is None else _told_groups(groups, [files.name for files in pairing.cases], patients)
    threads = threads_of(workers) if executor is None else 1  # elsewhere a process may do several cases at a time
    cases = [
        CaseJob(
            files.name,
            case_key(files, meant),
            measure_files,
            (files if executor is None else files.absolute(), meant, threads),
        )
        for files in pairing.cases
    ]
    about: dict[str, Any] = {"folders": {"predictions": text_path(predictions), "labels": text_path(drawn[0])}}
    if members:
        about["mean"] = {
            "of": mean,
            "logits": pairing.cases[0].averaging.logits,
            "members": [text_path(maps) for maps in (predictions, *members)],
        }
    outcome = measure_cohort(
        cases,
        meant,
        out,
        executor=executor or pool,
        pairing=pairing,
        provenance=about,
        progress=progress,
    )
    return outcome if told is None else _grouped(outcome, told, out, patients=patients, background=background)


def _told_groups(groups: str | os.PathLike[str], cases: Sequence[str], patients: str | None) -> Groups:
    """Read before there is work to lose."""
    from segcal.evaluation.groups import read_groups  # brings torch, as all that follows the cases

    return read_groups(groups, cases, patients=patients)


def _grouped(outcome: Outcome, groups: Groups, out: Path, *, patients: str | None, background: bool) -> Outcome:
    """The outcome with its groups, which are written."""
    if outcome.measured is None:
        return outcome
    from segcal.evaluation.group_tables import write_groups
    from segcal.evaluation.groups import compare_groups

    compared = compare_groups(outcome.measured, groups, patients=patients, background=background)
    write_groups(compared, out)
    return replace(outcome, groups=compared)


def open_cohort(
    predictions: str | os.PathLike[str],
    labels: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    reading: ReadOptions,
    *,
    raters_from: RatersFrom = "folders",
    members: Sequence[str | os.PathLike[str]] = (),
    mean: Mean = "probabilities",
    bins: int,
    background: bool = False,
    calibrator: str | os.PathLike[str] | None = None,
) -> tuple[Options, Pairing]:
    """How folders are to be read, and which of their files belong together: at least one case.

    With further folders of maps, `members`, the options are those of their mean. A label that nnU-Net's dataset.json
    names "ignore" is left out without being asked for.
    """
    drawn, predictions, others = label_folders(labels), Path(predictions), [Path(member) for member in members]
    naming = read_shared_naming(predictions, drawn, reading)
    options = naming.into(Options.of(reading, bins=bins, background=background))
    averaging = averaging_of(predictions, others, mean, options)
    if averaging is not None:
        options = replace(options, logits=averaging.yields_logits)
    if calibrator is not None:
        options = with_calibrator(options, calibrator)
    pairing = _rated(predictions, drawn, raters_from)
    check_names(naming, pairing.cases, options)
    if averaging is not None:
        for other in others:
            check_same_names(naming, read_naming(other, drawn[0], reading))
        pairing = pairing.averaged({other: _rated(other, drawn, raters_from) for other in others}, averaging)
    return options, pairing


def averaging_of(predictions: Path, members: Sequence[Path], mean: Mean, options: Options) -> Averaging | None:
    """How the mean of these folders is taken, which must differ; None where there is one alone."""
    one_of("mean", mean, MEANS)
    if not members and mean != "probabilities":
        raise ConfigError("--mean must come with --member; there is nothing to take the mean of.")
    if twice := _find_repeated([predictions, *members]):
        raise ConfigError(f"members must differ from each other and from the predictions; {twice} came twice.")
    return Averaging(mean, options.logits, options.sigmoid) if members else None


def label_folders(labels: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The folders of label maps, one for each rater where there are several; ConfigError where one comes twice."""
    folders = [Path(each) for each in ([labels] if isinstance(labels, str | os.PathLike) else labels)]
    twice = _find_repeated(folders)
    if not folders or twice is not None:
        came = "none came" if twice is None else f"{twice} came twice"
        raise ConfigError(f"labels must be one folder, or a different one for each rater; {came}.")
    return folders


def _find_repeated(paths: Sequence[Path]) -> Path | None:
    """Return the first path that leads to the same file or folder as one before it."""
    repeated = (path for i, path in enumerate(paths) if any(_is_same(path, other) for other in paths[:i]))
    return next(map(real_path, repeated), None)


def _is_same(one: Path, other: Path) -> bool:
    """Whether both paths lead to one place, for folders also if they differ in upper and lower case alone."""
    return real_path(one) == real_path(other) or (one.is_dir() and other.is_dir() and one.samefile(other))


def _rated(predictions: Path, labels: Sequence[Path], raters_from: RatersFrom) -> Pairing:
    """The cases with the label maps of their raters, at least one."""
    one_of("raters_from", raters_from, RATERS_FROM)
    if raters_from != "folders" and len(labels) > 1:
        raise ConfigError(f"raters from {raters_from} must be in one folder of labels; {len(labels)} came.")
    if raters_from == "channels":
        pairing = _paired(predictions, labels[0])
        return replace(pairing, cases=tuple(replace(case, rater_channels=True) for case in pairing.cases))
    if raters_from == "files":
        return pair_raters(predictions, labels[0])
    if len(labels) == 1:
        return _paired(predictions, labels[0])
    return rated({rater: _paired(predictions, own) for rater, own in zip(_rater_names(labels), labels, strict=True)})


def _rater_names(folders: Sequence[Path]) -> list[str]:
    """Return a different name for the folder of each rater; the results against the rater go to raters/NAME.

    The name is that of the folder, with the names of as many folders above as it takes until all names differ.
    """
    parts = [[_UNPORTABLE.sub("_", part) for part in real_path(folder).parts] for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["-".join(levels[-depth:]) for levels in parts]
        distinct = {unicodedata.normalize("NFC", name.casefold()) for name in names}  # as file systems may compare
        if len(distinct) == len(names) and max(len(name.encode()) for name in names) <= _MOST_BYTES:
            return names
    return [f"{levels[-1][:50]}-{i}" for i, levels in enumerate(parts, 1)]


def _paired(predictions: Path, labels: Path) -> Pairing:
    """The cases that both folders have, at least one."""
    pairing = pair_cases(predictions, labels)
    if not pairing.cases:
        raise ConfigError(why_nothing_pairs(predictions, labels, pairing))
    return pairing


def with_calibrator(options: Options, calibrator: str | os.PathLike[str]) -> Options:
    """The same through the calibrator of a file; ConfigError where it was fitted for other predictions."""
    from segcal.calibrators import load_calibrator
    from segcal.evaluation.calibrated import check_fits

    path = text_path(calibrator)
    fitted = load_calibrator(path)
    check_fits(fitted, options)
    return replace(options, calibrator=path, calibrator_fingerprint=fitted.fingerprint)


class CaseJob(NamedTuple):
    """A case to measure: its name, the key of all that its sums depend on, and what measures it.

    The function is called with the arguments, the name, and the path to save the sums to.
    """

    name: str
    key: str
    function: Callable[..., None]
    arguments: tuple[Any, ...]


def measure_cohort(
    cases: Sequence[CaseJob],
    options: Options,
    out: Path,
    *,
    executor: Executor,
    pairing: Pairing | None = None,
    provenance: dict[str, Any] | None = None,
    progress: Progress = lambda done, total: None,
) -> Outcome:
    """Measure the cases that are not measured yet, and write the results of all to `out`."""
    with open_parts(out) as parts:
        outcome, kept = measure_parts(cases, options, parts, executor=executor, pairing=pairing, progress=progress)
        if outcome.measured is not None:
            outcome.measured.provenance.update(provenance or {})
        from segcal.kernels.threads import one_torch_thread

        with one_torch_thread():  # small tensors, for which threads would wait for each other
            write_results(outcome, options, out)
        keep_only(parts, kept)
    return outcome


def measure_parts(
    cases: Sequence[CaseJob],
    options: Options,
    parts: Path,
    *,
    executor: Executor,
    pairing: Pairing | None = None,
    progress: Progress = lambda done, total: None,
) -> tuple[Outcome, list[Path]]:
    """Measure the cases whose sums are not in the folder of parts yet; what was found, and the files of all sums."""
    paths = {case.name: (parts / f"{case.key}.npz").absolute() for case in cases}
    waiting = [
        Job(case.name, case.function, (*case.arguments, case.name, paths[case.name]))
        for case in cases
        if not are_whole(paths[case.name], options)
    ]
    failures = {failure.case: failure for failure in do_all(waiting, executor, total=len(cases), progress=progress)}
    del waiting  # of many cases what is not needed any more is worth its room
    measured = {name: path for name, path in paths.items() if name not in failures}
    numbers, doubts = {}, {}
    for name, path in measured.items():
        numbers[name], doubtful = CaseSums.about(path)
        if doubtful:
            doubts[name] = doubtful
    strangers = find_strangers(numbers)
    usual = [name for name in measured if name not in strangers]
    evaluation = stack_cases(usual, lambda name: CaseSums.load(measured[name]), options) if usual else None
    facets = stack_facets({name: measured[name] for name in usual}, options)
    notes = gather_notes({name: found for name, found in doubts.items() if name not in strangers})
    failed = [*failures.values(), *strangers.values()]
    outcome = outcome_of(evaluation, failed, pairing or Pairing(()), notes)
    kept = [file for path in measured.values() for file in all_files(path)]
    return replace(outcome, facets=facets, parts={name: measured[name] for name in usual}), kept


def find_strangers(numbers: dict[str, int]) -> dict[str, Failure]:
    """Cases with another number of classes than most."""
    often = Counter(numbers.values())
    usual = min(often, key=lambda n: (-often[n], n), default=0)
    return {
        name: Failure(name, "ShapeError", f"has {number} classes where most cases have {usual}.")
        for name, number in numbers.items()
        if number != usual
    }


def measure_files(files: CaseFiles, options: Options, threads: int, name: str, path: Path) -> None:
    """Write the sums of a case to a file."""
    with unchanged(files.all):
        measured = measure_case(files, options, threads=threads)
    save_measured(measured, path, name, files.all)


def case_key(files: CaseFiles, options: Options) -> str:
    """Names the sums of a case: other files, or other options, give another key."""
    stamps = [stamp(path) for path in files.all]
    mean = [asdict(files.averaging), [len(each.predictions) for each in files.members]] if files.members else None
    about: list[Any] = [__version__, files.name, stamps, mean, asdict(replace(options, calibrator=None))]
    if files.raters or files.rater_channels:
        about.append([*(each.rater for each in files.raters), files.rater_channels])
    return key_of(*about)  # of a calibrator by its fingerprint, wherever it lies
