"""The commands for data: datasets, datasets check, datasets split, datasets groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from segcal._io.words import counted
from segcal.cli.app import app
from segcal.cli.options import StrictGrid
from segcal.cli.orderly import Verb, Verbs
from segcal.cli.shown import print_json, progress_bar, refusing, say, show_tables

if TYPE_CHECKING:
    from segcal.datasets import Check

datasets = typer.Typer(cls=Verbs, help="List supported datasets; check and split a download.")
app.add_typer(datasets, name="datasets")

Name = Annotated[str, typer.Argument(help="A dataset that `segcal datasets` lists, for example acdc.")]
Root = Annotated[Path, typer.Argument(help="Folder of the download.")]


@datasets.callback(invoke_without_command=True)
def list_datasets(context: typer.Context) -> None:
    """List supported datasets."""
    if context.invoked_subcommand is not None:
        return
    from segcal.datasets import describe

    for row in describe():
        print(f"{row.name}: {row.title}\n  layout   {row.layout}\n  classes  {', '.join(row.classes)}")
        if row.regions:
            print(f"  regions  {', '.join(row.regions)}")


@datasets.command(cls=Verb, epilog="Example: segcal datasets check acdc data/ACDC")
def check(
    name: Name,
    root: Root,
    strict_grid: StrictGrid = False,
    as_json: Annotated[bool, typer.Option("--json", help="Prints the results as JSON.")] = False,
) -> None:
    """Verify a download: counts, pairs, shapes, label values, spacing, missing classes. Exit code 1: problems found."""
    from segcal.datasets import check_dataset, open_dataset

    with refusing(), progress_bar("files") as advance:
        found = check_dataset(open_dataset(name, root), strict_grid=strict_grid, progress=advance)
    if as_json:
        content = {"problems": [problem._asdict() for problem in found.problems], "notes": list(found.notes)}
        print_json(json.dumps(content | dict(found.facts()) | {"missing": found.missing}, indent=2, ensure_ascii=False))
    else:
        _print_check(found)
    say(f"{counted(len(found.problems), 'problem')}, {counted(len(found.notes), 'note')}")
    if found.problems:
        raise typer.Exit(1)


def _print_check(found: Check) -> None:
    from rich.table import Table

    table = Table(show_header=False)
    for fact, value in found.facts():
        table.add_row(fact, str(value))
    notes = [f"note: {note}" for note in found.notes]
    show_tables([table], [*notes, *(f"{problem.case}: {problem.what}" for problem in found.problems)])


@datasets.command(cls=Verb, epilog="Example: segcal datasets split acdc data/ACDC --out split.txt")
def split(
    name: Name,
    root: Root,
    out: Annotated[Path, typer.Option("--out", help="Text file to write, one line per case, for example split.txt.")],
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the split.")] = 0,
) -> None:
    """Write the paper's split by patient, as a text file for the setting data.split."""
    from segcal.datasets import make_split, open_dataset, write_split

    with refusing():
        found = make_split(open_dataset(name, root), seed=seed)
        write_split(found, out)
    if found.note:
        say(found.note)
    numbers = f"{counted(len(found.train), 'case')} to train, {len(found.validation)} to validate"
    say(f"{numbers}, {len(found.test)} to test: {out}")


@datasets.command(cls=Verb, epilog="Example: segcal datasets groups acdc data/ACDC --out groups.csv")
def groups(
    name: Name,
    root: Root,
    out: Annotated[Path, typer.Option("--out", help="File to write, for example groups.csv.")],
) -> None:
    """Write the groups that the files of a dataset name, for example the pathologies of ACDC."""
    with refusing():
        from collections import Counter

        from segcal._io.files import make_folder, write_csv
        from segcal.datasets import dataset_groups, open_dataset

        header, rows = dataset_groups(open_dataset(name, root))
        make_folder(out.parent)
        write_csv(out, header, rows)
    for i, attribute in enumerate(header[1:], 1):
        counts = Counter(row[i] or "not told" for row in rows)
        say(f"{attribute}: {', '.join(f'{group} {number}' for group, number in sorted(counts.items()))}")
    say(f"{counted(len(rows), 'case')}: {out}")
