"""`melodi report`: what is in run folders and recipe folders, as tables and plots."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from melodi.cli.console import parse

Folders = Annotated[
    tyro.conf.Positional[tuple[Path, ...]],
    tyro.conf.arg(metavar="DIR [DIR ...]", help_behavior_hint="(required)"),
]


@dataclass
class ReportArgs:
    folders: Folders
    """Run folders, recipe folders, folders of recipes, or of these."""


def report(args: list[str]) -> None:
    """Run folder to plots, recipe folder to a page (extra: plot).

    A run gets a picture; a recipe, finished or not, a page as HTML and Markdown.

    Example: melodi report runs/books results
    """
    options = parse(ReportArgs, report, args)
    if not options.folders:
        raise ValueError("no folder was given: melodi report DIR")
    from melodi.paper.plan import RECIPE
    from melodi.paper.plots import plot_run
    from melodi.paper.report import write_report

    for folder in options.folders:
        below = (f"{'*/' * depth}{RECIPE}" for depth in range(3))
        recipes = [path for pattern in below for path in sorted(folder.glob(pattern))]
        for recipe in recipes:
            for path in write_report(recipe.parent):
                print(path)
        if not recipes:
            print(plot_run(folder))
