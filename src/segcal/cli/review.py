"""The verb that serves cases to look at: review."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from segcal._io.words import counted
from segcal.cli.app import app
from segcal.cli.orderly import Verb
from segcal.cli.shown import refusing, say


@app.command(cls=Verb)
def review(
    folder: Annotated[
        Path,
        typer.Argument(help="Results of evaluate, quality apply, audit or study run: the folder, or one file."),
    ],
    predictions: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FOLDER",
            help="Maps to show, if not where the results say; of several results, NAME=FOLDER, and repeated.",
        ),
    ] = None,
    labels: Annotated[Path | None, typer.Option(help="Their labels, if not where the results say.")] = None,
    images: Annotated[Path | None, typer.Option(help="Folder of their images.")] = None,
    decisions: Annotated[
        Path | None, typer.Option(help="File of the decisions; decisions.csv in the folder, if not given.")
    ] = None,
    reviewer: Annotated[str, typer.Option(help="Your name, which decisions are written with.")] = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Look at cases in a browser, worst first, and accept or reject them; served to this machine alone."""
    with refusing(stopped="Decisions are kept: the same command goes on from there."):
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
            say(f"{counted(server.cases, 'case')} to review; decisions go to {server.decisions}. Ctrl-C ends it.")
            print(server.url, flush=True)
            if browser:
                import webbrowser

                webbrowser.open(server.url)
            server.wait()


def _by_name(given: list[str]) -> str | dict[str, str] | None:
    """The one folder, or folders by the names of the results that they are of."""
    if len(given) == 1 and ("=" not in given[0] or Path(given[0]).exists()):
        return given[0]
    from segcal.errors import ConfigError

    named = dict(each.partition("=")[::2] for each in given)
    if len(named) < len(given) or not all(named.values()):
        raise ConfigError(f"--predictions must be NAME=FOLDER where there are several; got {', '.join(given)}.")
    return named or None
