"""All recipes by name, one for every table and figure of the paper that has perplexities."""

import difflib

from melodi.paper.ablations import (
    branching,
    copying,
    coverage,
    long_term_layers,
    long_term_position,
    memory_size,
    short_term_layers,
)
from melodi.paper.comparisons import baselines, longer_windows, systems, window_size
from melodi.paper.recipe import Recipe

RECIPES = {
    recipe.name: recipe
    for recipe in (
        baselines(),
        longer_windows(),
        memory_size(),
        coverage(),
        window_size(),
        short_term_layers(),
        long_term_layers(),
        branching(),
        copying(),
        long_term_position(),
        systems(),
    )
}


def recipe_named(name: str) -> Recipe:
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(RECIPES)}"
        folder = "" if near else ", and no folder of a run"
        raise ValueError(f"recipe {name!r} is unknown{folder}: {hint}")
    return RECIPES[name]
