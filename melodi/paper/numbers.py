"""The perplexities that the paper prints, as it prints them: Tables 3 to 8.

Tables 3 and 5 have one column for each corpus and vocabulary; all others are of PG-19 with the T5
vocabulary. The values of Figures 4 to 8 are only in pictures, and are not here.
"""

COLUMNS = (
    "PG-19 (Meena)",
    "PG-19 (T5)",
    "PG-19 (custom)",
    "arXiv (Meena)",
    "arXiv (custom)",
    "C4 (custom)",
)
"""Corpus and vocabulary, in the order of Tables 3 and 5."""
T5 = COLUMNS[1]
Numbers = dict[str, float | str]
"""A perplexity by column; a word where the paper has a word."""


def columns(*values: float) -> Numbers:
    return dict(zip(COLUMNS, values, strict=True))


def t5(value: float | str) -> Numbers:
    return {T5: value}


THIRTEEN_LAYERS = {
    "Transformer-XL": columns(8.65, 11.41, 12.42, 2.60, 3.22, 18.22),
    "Block-Recurrent": columns(8.30, 10.98, 11.90, 2.26, 2.70, 17.82),
    "Melodi S192+L32": columns(8.08, 10.51, 11.47, 2.12, 2.54, 17.55),
    "Memorizing": columns(8.07, 10.62, 11.53, 2.14, 2.56, 17.37),
    "Melodi S128+L64": columns(8.06, 10.44, 11.42, 2.11, 2.52, 17.53),
    "Melodi S192+L96": columns(7.91, 10.29, 11.27, 2.09, 2.49, 17.25),
}
"""Table 3, and the lower half of Table 5."""
TWELVE_LAYERS = {
    "Transformer-XL": columns(8.76, 11.54, 12.63, 2.61, 3.23, 18.61),
    "Block-Recurrent": columns(8.47, 11.12, 12.11, 2.27, 2.73, 18.27),
    "Melodi S192+L32": columns(8.22, 10.66, 11.66, 2.13, 2.55, 18.03),
    "Memorizing": columns(8.15, 10.74, 11.68, 2.15, 2.57, 17.88),
    "Melodi S128+L64": columns(8.16, 10.61, 11.66, 2.13, 2.55, 18.01),
    "Melodi S192+L96": columns(8.08, 10.48, 11.47, 2.11, 2.51, 17.75),
}
"""The upper half of Table 5."""
LONGER_WINDOWS: dict[tuple[str, int], Numbers] = {
    ("Transformer-XL", 512): t5(11.41),
    ("Transformer-XL", 1024): t5(11.11),
    ("Transformer-XL", 2048): t5(10.99),
    ("Transformer-XL", 3072): t5(10.96),
    ("Block-Recurrent", 512): t5(10.98),
    ("Block-Recurrent", 1024): t5(10.91),
    ("Block-Recurrent", 2048): t5(10.88),
    ("Memorizing", 512): t5(10.62),
    ("Memorizing", 1024): t5(10.53),
    ("Memorizing", 2048): t5("not stable"),
    ("Melodi S192+L32", 512): t5(10.51),
    ("Melodi S128+L64", 512): t5(10.44),
    ("Melodi S192+L96", 512): t5(10.29),
}
"""Table 6, by model and window."""
BRANCHING: dict[tuple[str, bool], Numbers] = {
    ("ST", False): t5(11.68),
    ("ST", True): t5(11.39),
    ("ST+LT", False): t5(11.24),
    ("ST+LT", True): t5(10.95),
}
"""Table 4, by memory and branching."""
COPYING: dict[tuple[int, bool], Numbers] = {
    (96, True): t5(11.00),
    (96, False): t5(10.92),
    (64, True): t5(11.36),
    (64, False): t5(11.08),
    (32, True): t5(11.42),
    (32, False): t5(11.25),
}
"""Table 7, by S = L and copying."""
POSITION = {
    5: t5(11.00),
    6: t5(11.01),
    7: t5(11.03),
    8: t5(10.95),
    9: t5(10.96),
    10: t5(10.95),
    11: t5(10.94),
}
"""Table 8, by the index of the long-term layer."""
