"""The command that serves cases for review: review."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from segcal._io.words import counted
from segcal.cli.app import app
from segcal.cli.orderly import Verb
from segcal.cli.shown import refusing, say


@app.command(cls=Verb, epilog="Example: segcal review results --images images")
def review(
    folder: Annotated[
        Path,
        typer.Argument(help="Results of evaluate, quality apply, audit or study run: a folder or one file."),
    ],
    predictions: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FOLDER",
            help="Maps to show, if they have moved. For several results repeat NAME=FOLDER.",
        ),
    ] = None,
    labels: Annotated[Path | None, typer.Option(help="Folder of label maps, if it has moved.")] = None,
    images: Annotated[Path | None, typer.Option(help="Folder of images.")] = None,
    decisions: Annotated[
        Path | None, typer.Option(help="Decisions file. Default: decisions.csv in the folder.")
    ] = None,
    reviewer: Annotated[str, typer.Option(help="Your name, written with each decision.")] = "",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the server, for example 8765. 0: any free port.")
    ] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Opens the page in a browser.")] = True,
) -> None:
    """Review cases in a browser, worst first; accept or reject them. The server is local."""
    with refusing(stopped="Decisions are kept. Run the same command again to resume."):
        from segcal.review.serving import serve_review

        with serve_review(
            folder,
            predictions=_by_name(predictions or []),
            labels=labels,
            images=images,
            decisions=decisions,
            reviewer=reviewer,
            port=port,
        ) as server:
            for note in server.notes:
                say(f"note: {note}")
            say(f"{counted(server.cases, 'case')} to review; decisions: {server.decisions}. Press Ctrl-C to stop.")
            print(server.url, flush=True)
            if browser:
                import webbrowser

                webbrowser.open(server.url)
            server.wait()


def _by_name(given: list[str]) -> str | dict[str, str] | None:
    """The one folder, or a folder for each result name."""
    if len(given) == 1 and ("=" not in given[0] or Path(given[0]).exists()):
        return given[0]
    from segcal.errors import ConfigError

    named = dict(each.partition("=")[::2] for each in given)
    if len(named) < len(given) or not all(named.values()):
        raise ConfigError(
            f"--predictions must be NAME=FOLDER if there are several; got {', '.join(given)}. Add each name."
        )
    return named or None
