"""The command that compares: compare."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from segcal._io.words import counted
from segcal.cli.app import app
from segcal.cli.options import Evaluations, Holm, Numbers, Patients, Seed, Test
from segcal.cli.orderly import Verb
from segcal.cli.shown import print_json, refusing, say, show_tables

if TYPE_CHECKING:
    from segcal.comparison.comparison import Comparison

COMPARISON = ("comparison.csv", "comparison.md", "comparison.tex")
MOST_LEFT_OUT = 3  # cases that a screen names one by one


@app.command(cls=Verb, epilog="Example: segcal compare results/before results/after --out comparison")
def compare(
    evaluations: Evaluations,
    out: Annotated[Path, typer.Option("--out", help="Folder for comparison.csv, .md, .tex and figures.")],
    patients: Patients = None,
    test: Test = "t",
    holm: Holm = False,
    bins: Annotated[
        int | None, typer.Option(min=1, help="Number of bins of the calibration errors; must divide 1200.")
    ] = None,
    background: Annotated[bool, typer.Option("--background", help="Compares the background class, too.")] = False,
    level: Annotated[float, typer.Option(help="Level of the confidence intervals, for example 0.95.")] = 0.95,
    resamples: Annotated[int, typer.Option(min=1, help="Number of bootstrap samples.")] = 2000,
    seed: Seed = 0,
    figures: Annotated[
        str, typer.Option(help="Writes figures in these formats, for example png,svg. Default: none.")
    ] = "",
    full: Annotated[bool, typer.Option("--full", help="Prints all tables, as in comparison.md.")] = False,
    as_json: Numbers = False,
) -> None:
    """Compare methods on the same cases: means, changes, intervals over patients, paired tests, floors."""
    import segcal
    from segcal._io.files import make_folder, replacing
    from segcal.comparison.tables import to_json, write_comparison
    from segcal.evaluation.evaluation import read_evaluations
    from segcal.evaluation.remarks import remarks

    with refusing():
        found = read_evaluations(evaluations)
        make_folder(out)
        comparison = segcal.compare(
            found,
            patients=patients,
            test=test,
            correction="holm" if holm else "none",
            bins=bins,
            background=background,
            level=level,
            resamples=resamples,
            seed=seed,
        )
        told = remarks(found)
        with replacing(out, COMPARISON) as new:
            written = write_comparison(comparison, new, remarks=told)
            if figures:
                from segcal.plots import write_figures

                written += write_figures(found, new, formats=tuple(figures.split(",")), patients=patients)
    if as_json:
        print_json(to_json(comparison))
    else:
        _show_comparison(comparison, told, full=full)
    say(f"wrote {', '.join(path.name for path in written)} in {out}")


def _show_comparison(comparison: Comparison, remarks: list[str], *, full: bool) -> None:
    """The main tables, or all of them."""
    from dataclasses import replace

    from segcal.comparison.tables import comparison_tables, main_tables, notes

    if full:
        show_tables(comparison_tables(comparison), [*notes(comparison), *remarks])
        return
    few = dict(list(comparison.unmatched.items())[:MOST_LEFT_OUT])
    more = len(comparison.unmatched) - len(few)
    show_tables(main_tables(comparison), [*notes(replace(comparison, unmatched=few)), *remarks])
    if more:
        say(f"{counted(more, 'more case')} left out; comparison.md lists them.")
    say("These tables are for all classes; comparison.md has every table, and --full prints them.")
