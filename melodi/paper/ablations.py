"""Recipes that change one thing in Melodi: Figures 4, 5, 7 and 8, Tables 4, 7 and 8."""

from melodi.paper import numbers
from melodi.paper.comparisons import BASELINES, MODELS
from melodi.paper.recipe import Claim, Recipe, Row, ordered
from melodi.paper.shapes import Shape


def memory_size() -> Recipe:
    shorts, longs = (8, 32, 64, 128, 192), (0, 32, 64, 96)
    rows = [
        Row(sized(s, m), Shape(short=s, long=m), {}, f"L{m}" if m else "no long-term", note=f"S{s}")
        for m in longs
        for s in shorts
    ]
    rows += [Row(name, MODELS[name], {}, name) for name in BASELINES]
    where = "Sec. 3.4, Fig. 4"
    claims = [
        Claim((sized(192, 32),), (name,), f"{where}, last sentence and caption")
        for name in BASELINES
    ]
    ends = [(sized(192, m), sized(8, m)) for m in longs]
    ends += [(sized(s, 96), sized(s, 0)) for s in shorts]
    claims += [Claim((most,), (least,), f"{where}, ends of a curve") for most, least in ends]
    for m in longs:
        claims += ordered([sized(s, m) for s in shorts], f"{where}, more short-term")
    for s in shorts:
        claims += ordered([sized(s, m) for m in longs], f"{where}, more long-term")
    return Recipe(
        name="memory-size",
        title="Figure 4: perplexity against memory size",
        rows=tuple(rows),
        reference=sized(128, 64),
        claims=tuple(claims),
    )


def sized(short: int, long: int) -> str:
    return f"S{short}+L{long}" if long else f"S{short}"


def coverage() -> Recipe:
    grid = (2, 4, 8, 16, 32, 64, 128)
    rows = [Row(f"{q} windows", Shape(coverage=q), {}, "Melodi S128+L64", q) for q in grid]
    label = {q: f"{q} windows" for q in grid}
    where = "Sec. 3.4, Fig. 5"
    faster = "a doubling between 4 and 32 windows gains more than that from 2 to 4"
    level = "32 to 128 windows gain less than 8 to 32"
    return Recipe(
        name="coverage",
        title="Figure 5: coverage of the long-term memory",
        rows=tuple(rows),
        reference=label[128],
        claims=(
            Claim((label[128],), (label[2],), where),
            *ordered([label[q] for q in grid[:5]], where),
            # Three doublings against three times the first.
            Claim(
                (label[32], *[label[2]] * 3), (label[4],) * 4, f"{where}, second sentence", faster
            ),
            Claim((label[32], label[32]), (label[8], label[128]), f"{where}, last part", level),
        ),
        axis="windows in the long-term queue",
        axis_scale="log2",
        remarks=("The grid is in windows, the same at every scale.",),
    )


def short_term_layers() -> Recipe:
    grid = (1, 2, 4, 7, 13)
    label = {n: f"{n} of 13 layers" for n in grid}
    rows = [
        Row(label[n], Shape(short_layers=n, counted=True), {}, "Melodi S128+L64", n) for n in grid
    ]
    where = "Sec. 3.4, Fig. 7"
    fewer = "1 to 4 layers gain more than 4 to 13"
    half = "7 of 13 layers as good as 13"
    return Recipe(
        name="short-term-layers",
        title="Figure 7: number of short-term layers",
        rows=tuple(rows),
        reference=label[13],
        claims=(
            *ordered([label[n] for n in grid[:-1]], where),
            Claim((label[4], label[4]), (label[1], label[13]), where, fewer),
            Claim((label[7],), (label[13],), where, half, "equal"),
        ),
        axis="layers with short-term memory, of 13",
        axis_scale="linear",
        remarks=("The stack has 13 layers at every scale.",),
    )


def long_term_layers() -> Recipe:
    places = {1: (8,), 2: (6, 10), 3: (5, 8, 11)}
    rows = [Row("no long-term layer", Shape(long=0, counted=True), {}, "", 0)]
    for m in (32, 64):
        for n, layers in places.items():
            shape = Shape(long=m, long_layers=layers, counted=True)
            rows.append(Row(many(n, m), shape, {}, f"L{m}", n))
    where = "Sec. 3.4, Fig. 8"
    return Recipe(
        name="long-term-layers",
        title="Figure 8: number of long-term layers",
        rows=tuple(rows),
        reference=many(1, 64),
        claims=(
            Claim((many(1, 64),), ("no long-term layer",), where),
            Claim((many(2, 64),), (many(1, 64),), where, "L64: 2 layers as good as 1", "equal"),
            Claim((many(3, 64),), (many(1, 64),), where, "L64: 3 layers as good as 1", "equal"),
            Claim((many(2, 32),), (many(1, 32),), where),
            Claim((many(1, 64),), (many(2, 32),), where),
        ),
        axis="layers with long-term memory",
        axis_scale="linear",
        remarks=(
            "Which layers they are the paper does not say: 8; 6 and 10; 5, 8 and 11 of 0 to 12.",
            "The stack has 13 layers at every scale.",
        ),
    )


def many(count: int, long: int) -> str:
    return f"{count} × L{long}"


def branching() -> Recipe:
    words = {True: "branching", False: "no branching"}
    rows = [
        Row(
            f"{memory}, {words[branching]}",
            Shape(long=64 if memory == "ST+LT" else 0, branching=branching),
            paper,
            words[branching],
            memory,
        )
        for (memory, branching), paper in numbers.BRANCHING.items()
    ]
    return Recipe(
        name="branching",
        title="Table 4: summary branching",
        rows=tuple(rows),
        reference="ST+LT, branching",
        claims=tuple(
            Claim((f"{memory}, branching",), (f"{memory}, no branching",), "Sec. 3.4, Table 4")
            for memory in ("ST", "ST+LT")
        ),
        axis="memory",
        axis_scale="category",
    )


def copying() -> Recipe:
    words = {True: "copied", False: "mixed"}
    rows = [
        Row(f"S{n}+L{n}, {words[copying]}", shape, paper, words[copying], f"S{n}+L{n}")
        for (n, copying), paper in numbers.COPYING.items()
        for shape in [Shape(short=n, long=n, copying=copying)]
    ]
    return Recipe(
        name="copy",
        title="Table 7: copying short-term tokens to long-term memory",
        rows=tuple(rows),
        reference="S64+L64, mixed",
        claims=tuple(
            Claim((f"S{n}+L{n}, mixed",), (f"S{n}+L{n}, copied",), "Appendix D, Table 7")
            for n in (96, 64, 32)
        ),
        axis="memory",
        axis_scale="category",
    )


def long_term_position() -> Recipe:
    label = {i: f"layer {i}" for i in numbers.POSITION}
    rows = [
        Row(label[i], Shape(long_layers=(i,), counted=True), paper, "Melodi S128+L64", i)
        for i, paper in numbers.POSITION.items()
    ]
    claims = [
        Claim((label[i],), (label[8],), "Appendix D, Table 8", f"layer {i} as good as 8", "equal")
        for i in label
        if i != 8
    ]
    return Recipe(
        name="long-term-position",
        title="Table 8: position of the long-term layer",
        rows=tuple(rows),
        reference=label[8],
        claims=tuple(claims),
        axis="index of the long-term layer, of 0 to 12",
        axis_scale="linear",
        remarks=("The stack has 13 layers at every scale.",),
    )
