"""All recipes by name, one for every table and figure of the paper that has perplexities."""

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
        raise ValueError(f"recipe {name!r} is unknown: choose one of {', '.join(RECIPES)}")
    return RECIPES[name]
