"""NEXT.md: what an audit left, and the commands that use it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from segcal._io.files import write_whole
from segcal._io.words import counted
from segcal.audit.result import Audit
from segcal.evaluation.options import ReadOptions

ENSEMBLE = (
    "These maps are the mean of all folds; each map of the audit comes from one fold. An ensemble is usually less "
    "confident. If you have labels of new cases, evaluate first, or predict with one fold (`-f 0`)."
)


def write_advice(audit: Audit) -> None:
    """Write the page for people."""
    write_whole(audit.advice, "\n".join(_lines(audit)).encode(errors="replace"))


def _lines(audit: Audit) -> Iterator[str]:
    out, failed = audit.out, audit.outcome.failures
    yield "# Next steps\n"
    cases = counted(len(audit.outcome.evaluation.cases), "case")
    yield f"{cases} of `{audit.sources.predictions}` against `{audit.sources.labels}`."
    if failed:
        yield f"{counted(len(failed), 'case')} failed; `{out / 'before' / 'failures.csv'}` says why."
    if not out.is_absolute():
        yield f"The commands are for the folder `{Path.cwd()}`."
    yield ""
    yield from _files(audit)
    for step, why in audit.skipped.items():
        yield f"\nThe step `{step}` was skipped: {why}"
    for step, why in audit.failed.items():
        yield f"\nThe step `{step}` failed: {why}"
    for heading, text, commands in _sections(audit):
        yield f"\n## {heading}"
        yield from filter(None, [text])
        yield "```sh"
        yield from commands
        yield "```"
    yield ""


def _files(audit: Audit) -> Iterator[str]:
    yield "| File | Content |"
    yield "| --- | --- |"
    held_out = "each case through a calibrator that was fitted without its patient"
    about: Mapping[Path | None, str] = {
        audit.report: "the report; open it in a browser" + (": before and calibrated" if audit.calibrator else ""),
        audit.calibrator: f"the calibrator, fitted to all cases. {audit.chosen}.",
        audit.quality: "the quality model for new cases",
        audit.out / "before": "results of the predictions, as `segcal evaluate` writes them",
        audit.out / "calibrated" if audit.calibrator else None: f"the same, {held_out}",
    }
    for path, text in about.items():
        if path is not None:
            yield f"| `{path}` | {text} |"


def _sections(audit: Audit) -> Iterator[tuple[str, str, list[str]]]:
    """Heading, a sentence, and commands; NEW_MAPS is a folder of maps of new cases."""
    options, calibrator = audit.sources.options, audit.calibrator
    logits = ["--logits"] if options.logits else []
    through = [] if calibrator is None else ["--calibrator", calibrator]
    if audit.sources.predict is not None:
        yield "Predict new cases with nnU-Net", ENSEMBLE, [audit.sources.predict]
    if calibrator is not None:
        command = _command("calibrate", "apply", calibrator, "NEW_MAPS", *logits, "--out", "calibrated-maps")
        yield "Calibrate the maps of new cases", "", [command]
    decide = _command("decide", "NEW_MAPS", *through, *_reading(options), "--out", "decided")
    text = "The most probable class of each voxel; `--rule threshold=0.3` predicts more voxels."
    yield "Turn maps into label maps", text, [decide]
    if audit.quality is not None:
        promise = _command("quality", "apply", audit.quality, "NEW_MAPS", *through, "--out", "queue")
        text = "Predicted Dice and volumes with intervals, and an order for review; no labels are needed."
        yield "Predict the quality of new cases", text, [promise, _command("review", "queue")]
    images = [] if audit.sources.images is None else ["--images", audit.sources.images]
    yield "Review the cases of this audit", "", [_command("review", audit.out, *images)]
    other = _command(
        "evaluate", "OTHER_MAPS", audit.sources.labels, *_reading(options, measured=True), "--out", "other"
    )
    names = ["before", *(["calibrated"] if calibrator is not None else [])]
    ours = [f"{name}={audit.out / name}" for name in names]
    compare = _command("compare", *ours, "other", "--out", "comparison")
    yield "Compare with another network on the same cases", "", [other, compare]


def _reading(options: ReadOptions, *, measured: bool = False) -> list[object]:
    """The options of a command that say how maps are read, as far as a command line can say it."""
    words: list[object] = []
    for flag, wanted in (("--logits", options.logits), ("--sigmoid", options.sigmoid)):
        words += [flag] if wanted else []
    if isinstance(options.regions, str | os.PathLike):
        words += ["--regions", os.fspath(options.regions)]
    names = options.class_names
    if isinstance(names, str | os.PathLike):
        words += ["--class-names", os.fspath(names)]
    elif isinstance(names, Sequence):
        words += ["--class-names", ",".join(names)]
    if measured and options.ignore_index is not None:
        words += ["--ignore-index", options.ignore_index]
    if measured and options.strict_grid:
        words += ["--strict-grid"]
    return words


def _command(*words: object) -> str:
    return "segcal " + " ".join(shlex.quote(str(word)) for word in words)
