"""The page itself: numbers and sentences put into the templates, as one file that needs nothing else.

Whatever comes from outside (names of cases, classes and methods, paths, captions) is escaped: by Jinja in the
markup, by `embedded_json` in the data (see `rendering`). The page's own policy lets only the script and style that are
written here run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from segcal._io.files import make_folder, write_whole
from segcal._io.words import joined
from segcal.comparison.comparison import Comparison, compare
from segcal.comparison.entry import Entry
from segcal.comparison.matching import match_cases
from segcal.comparison.tables import LAYOUTS, MAIN, best_value, explanations, to_csv
from segcal.errors import ConfigError, FileError
from segcal.evaluation.columns import Column, Label
from segcal.evaluation.evaluation import Evaluation
from segcal.evaluation.intervals import patients_of
from segcal.evaluation.raters import rater_sentences, rater_tables, raters_of
from segcal.evaluation.remarks import evaluation_notes, failed_cases
from segcal.evaluation.tables import ALL_CLASSES, Table
from segcal.kernels.threads import one_torch_thread
from segcal.plots.colors import method_colors
from segcal.report.content import case_data, chart_data, method_diagrams
from segcal.report.decisions import decision_data
from segcal.report.reading import reading
from segcal.report.rendering import base64_text, render_page
from segcal.report.sampling import MOST_NAMED, shown_cases
from segcal.report.summary import Summary, summarize
from segcal.viewer.cases import ViewedCase
from segcal.viewer.embedding import embedded_facts, embedded_volumes, niivue_license, niivue_script, packed

SCRIPTS = ("svg.js", "charts.js", "cases.js", "decisions.js", "report.js")
VIEWER_SCRIPTS = ("viewer.js", "embedded.js")
PNG = b"\x89PNG\r\n\x1a\n"
PARTS = {  # each fits a screen beside the other
    "overlap, calibration and what it cost": LAYOUTS[MAIN[0]],
    "other errors": (
        *(Column(metric, "macro") for metric in ("ece", "mce")),
        *(Column("ace", average) for average in ("micro pooled", "micro paper")),
    ),
}
OTHER_METRICS = (  # heading, average, metric
    ("Signed gap", "macro", "signed_gap"),
    ("Overconfident part of the ECE", "macro", "overconfidence"),
    ("Underconfident part of the ECE", "macro", "underconfidence"),
    ("ACE, bins of equal count above 1 %", "macro", "equal_mass_ace"),
    *(
        (f"Micro {metric.upper()} ({reading})", f"micro {reading}", metric)
        for metric in ("ece", "mce")
        for reading in ("paper", "pooled")
    ),
)


class ReportMap(NamedTuple):
    """A picture of a case, as PNG."""

    case: str
    caption: str
    png: bytes


class ReportFigure(NamedTuple):
    """A figure of a section, as SVG, with its size on the page in pixels."""

    name: str
    caption: str
    svg: bytes
    width: int
    height: int


class ReportSection(NamedTuple):
    """A section with tables and figures of its own, as of lesions or groups.

    anchor: its place in the page's address, as "lesions".
    lead: what it shows, in a sentence or two.
    notes: what must be known to read it.
    """

    anchor: str
    title: str
    lead: str
    tables: tuple[Table, ...] = ()
    figures: tuple[ReportFigure, ...] = ()
    notes: tuple[str, ...] = ()


def build_report(
    evaluations: Mapping[str, Evaluation],
    out: str | os.PathLike[str],
    *,
    patients: str | None = None,
    maps: Sequence[ReportMap] = (),
    cases: Sequence[ViewedCase] = (),
    sections: Sequence[ReportSection] = (),
    title: str | None = None,
    test: Literal["t", "wilcoxon"] = "t",
    correction: Literal["none", "holm"] = "none",
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    comparison: Comparison | None = None,
) -> Path:
    """Write one self-contained HTML file on these evaluations, the first of which is the baseline. Where it is.

    A case that not all methods have is left out of the comparison, and listed. Raises what `compare` raises, and
    FileError where `out` is a folder or a map is no PNG.

    evaluations: by the name of the method, the baseline first.
    out: the file, which is replaced if it is there.
    patients: which cases belong together, as in `compare`.
    maps: pictures of cases to embed.
    cases: cases whose volumes to embed, to be looked at in three planes; `segcal.viewer.view_cases` makes them.
    sections: further sections, as `segcal.report.lesions.lesion_section` makes one.
    title: of the page; if not given, it follows from the methods.
    test, correction, level, resamples, seed: as in `compare`.
    comparison: of these evaluations, if there is one already. It is taken as it is, with its own test, correction and
        level; give the same `patients`.

    >>> import tempfile, torch
    >>> from segcal import EvaluationAccumulator
    >>> accumulator = EvaluationAccumulator()
    >>> accumulator.update(torch.full((2, 2, 8), 0.5), torch.tensor([[0, 1] * 4] * 2), ["one", "two"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     build_report({"baseline": accumulator.compute()}, f"{folder}/report.html", resamples=10).name
    'report.html'
    """
    out = Path(out)
    if out.is_dir():
        raise FileError(f"out must be a file, as report.html; {out} is a folder. Give a file name.")
    make_folder(out.parent)
    for picture in maps:
        if not picture.png.startswith(PNG):
            raise FileError(
                f"maps must be PNG pictures; that of case {picture.case!r} is not one. Save the picture as PNG."
            )
    with one_torch_thread():
        if comparison is None:
            comparison = compare(
                evaluations,
                patients=patients,
                test=test,
                correction=correction,
                level=level,
                resamples=resamples,
                seed=seed,
            )
        page = _page(
            evaluations,
            comparison,
            patients=patients,
            maps=maps,
            viewed=cases,
            sections=sections,
            title=title,
            seed=seed,
        )
    write_whole(out, page.encode(errors="replace"))  # names of files may hold what is no text
    return out


def _page(
    evaluations: Mapping[str, Evaluation],
    comparison: Comparison,
    *,
    patients: str | None,
    maps: Sequence[ReportMap],
    viewed: Sequence[ViewedCase],
    sections: Sequence[ReportSection],
    title: str | None,
    seed: int,
) -> str:
    level = comparison.level
    matched, _ = match_cases(evaluations)
    groups = patients_of(next(iter(matched.values())).cases, patients)
    _check_comparison(comparison, matched, groups)
    diagrams = method_diagrams(matched, groups, level=level, seed=seed)
    parts = {method: _like(part.foreground(), comparison.classes) for method, part in evaluations.items()}
    names = list(dict.fromkeys(name for part in parts.values() for name in part.cases))
    wanted = [*(case.volumes.case for case in viewed), *(picture.case for picture in maps)]
    shown = shown_cases(parts, names, wanted)
    cases = case_data(parts, dict(zip(names, patients_of(names, patients), strict=True)), shown, level=level)
    return _render(
        title=title or f"Calibration of {joined(comparison.methods)}",
        comparison=comparison,
        summary=summarize(comparison, diagrams),
        paragraphs=reading(comparison, diagrams),
        maps=maps,
        viewed=viewed,
        sections=sections,
        evaluations=evaluations,
        data=chart_data(comparison, matched, diagrams)
        | {"decisions": decision_data(comparison, matched, names, shown), "cases": cases}
        | {"csv": packed(to_csv(comparison).encode())}
        | ({"viewed": embedded_facts(viewed)} if viewed else {}),
    )


def _check_comparison(comparison: Comparison, matched: Mapping[str, Evaluation], patients: Sequence[str]) -> None:
    """One that was made elsewhere must be of what the page shows besides."""
    first = next(iter(matched.values()))
    for word, came, shown in (
        ("methods", comparison.methods, tuple(matched)),
        ("classes", comparison.classes, first.classes),
        ("bins", (comparison.bins,), (first.bins,)),
        ("cases", (comparison.cases,), (len(first.cases),)),
        ("patients", (comparison.patients,), (len(set(patients)),)),
    ):
        if came != shown:
            raise ConfigError(
                f"comparison must have the {word} of the report's evaluations; it has {', '.join(map(str, came))}, "
                f"they have {', '.join(map(str, shown))}."
            )
    for entry in comparison.entries:
        if entry.seeds > 1:
            raise ConfigError(
                f"comparison must be of one evaluation of each method, as the report's diagrams are; {entry.method} "
                f"has {entry.seeds} seeds."
            )


def _like(evaluation: Evaluation, classes: Sequence[str]) -> Evaluation:
    """With its classes in this order."""
    return evaluation.select(classes=[evaluation.classes.index(name) for name in classes])


def _origin(evaluation: Evaluation) -> dict[str, Any]:
    facts = {
        "cases": len(evaluation.cases),
        "classes": evaluation.classes,
        "bins": evaluation.bins,
        "fine bins": evaluation.statistics.binning.bins,
    }
    hidden = ("failures", "notes", "raters")  # in sections of their own
    told = {name: fact for name, fact in evaluation.provenance.items() if name not in hidden}
    files = told.pop("files", None)
    if isinstance(files, dict) and files:
        number = sum(len(stamps) for stamps in files.values())
        facts["files"] = f"{number}; their sizes and times are in the evaluation's .json"
    return facts | told


def _render(
    *,
    title: str,
    comparison: Comparison,
    summary: Summary,
    paragraphs: Sequence[str],
    maps: Sequence[ReportMap],
    viewed: Sequence[ViewedCase],
    sections: Sequence[ReportSection],
    evaluations: Mapping[str, Evaluation],
    data: Mapping[str, Any],
) -> str:
    niivue = niivue_script() if viewed else ""
    failures = [(i, case) for i, part in enumerate(evaluations.values()) for case in failed_cases(part)]
    return render_page(
        "report.html.j2",
        colors=method_colors(comparison.methods),
        styles=("viewer.css",) if viewed else (),
        scripts=SCRIPTS + (VIEWER_SCRIPTS if viewed else ()),
        later_scripts=[niivue] if viewed else [],
        data=data,
        title=title,
        comparison=comparison,
        summary=summary,
        paragraphs=paragraphs,
        notes=explanations(comparison),
        tables=[_tables(comparison, which) for which in comparison.case_sets],
        others=list(_other_rows(comparison)),
        undecided=[method for method, each in evaluations.items() if each.decisions is None],
        missing=_missing(comparison.classes, data["cases"]),
        most_named=MOST_NAMED,
        sampled=None if data["cases"]["shown"] is None else len(data["cases"]["shown"]),
        maps=[(picture, base64_text(picture.png)) for picture in maps],
        extra=[(section, [(each, base64_text(each.svg)) for each in section.figures]) for section in sections],
        viewed=viewed,
        volumes=embedded_volumes(viewed),
        niivue=packed(niivue.encode()),
        niivue_license=niivue_license(),
        known_cases=frozenset(data["cases"]["names"]),
        failures=failures,
        failed=len({failure.case for _, failure in failures}),
        remarks=[(i, note) for i, part in enumerate(evaluations.values()) for note in evaluation_notes(part)],
        raters=[(i, table) for i, part in enumerate(evaluations.values()) for table in rater_tables(raters_of(part))],
        rater_sentences=rater_sentences(),
        provenance={method: _origin(part) for method, part in evaluations.items()},
    )


def _tables(comparison: Comparison, which: str) -> dict[str, Any]:
    """Of these cases, all parts: what each is about, and its rows."""
    return {
        "which": which,
        "number": comparison.cases if which == "all" else comparison.complete,
        "parts": [
            {"about": about, "columns": columns, "groups": _groups(comparison, columns, which)}
            for about, columns in PARTS.items()
        ],
    }


def _groups(comparison: Comparison, columns: Sequence[Column], which: str) -> list[tuple[str, list[Any]]]:
    """One group of rows for the mean over classes and one for each class, a row for each method."""
    labels: tuple[Label, ...] = (None, *comparison.classes) if len(comparison.classes) > 1 else comparison.classes
    groups = []
    for label in labels:
        cells = [_column_cells(comparison, column, which, label) for column in columns]
        groups.append((label or ALL_CLASSES, list(zip(*cells, strict=True))))
    return groups


def _column_cells(comparison: Comparison, column: Column, which: str, label: Label) -> list[tuple[Entry, bool]]:
    """The entry of each method, and whether it is the best: as it is printed, so that equals are marked alike."""
    entries = [
        comparison.find(method, cases=which, average=column.average, label=label, metric=column.metric)
        for method in comparison.methods
    ]
    best = best_value(entries, column)
    return [(entry, best is not None and round(entry.value, column.digits) == best) for entry in entries]


def _other_rows(comparison: Comparison) -> Iterator[tuple[str, list[Entry]]]:
    for heading, average, metric in OTHER_METRICS:
        yield heading, [comparison.find(method, average=average, metric=metric) for method in comparison.methods]


def _missing(classes: Sequence[str], cases: Mapping[str, Any]) -> list[tuple[str, float, list[str]]]:
    """Of each class: its name, the share of cases without it, and which."""
    found = []
    for i, name in enumerate(classes):
        lacking = [case for case, gone in zip(cases["names"], cases["missing"], strict=True) if i in gone]
        found.append((name, len(lacking) / len(cases["names"]), lacking))
    return found
