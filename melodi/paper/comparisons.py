"""Recipes that compare systems: Tables 3, 5 and 6, Figure 6, and all systems beyond the paper."""

from dataclasses import replace

from melodi.paper import numbers
from melodi.paper.recipe import Claim, Recipe, Row, ordered
from melodi.paper.shapes import WINDOW, Shape, System

MODELS = {
    "Transformer-XL": Shape("transformer-xl"),
    "Block-Recurrent": Shape("block-recurrent"),
    "Melodi S192+L32": Shape(short=192, long=32),
    "Memorizing": Shape("memorizing"),
    "Melodi S128+L64": Shape(),
    "Melodi S192+L96": Shape(short=192, long=96),
}
"""The rows of Table 3, in its order."""
MELODI = [name for name in MODELS if name.startswith("Melodi")]
BASELINES = [name for name in MODELS if not name.startswith("Melodi")]
DEFAULT = "Melodi S128+L64"


def kind_of(name: str) -> str:
    """The curve of a model: its system."""
    return name.split(" S")[0]


def sizes_of(name: str) -> str:
    """S and L of a Melodi; nothing for other systems."""
    return name.removeprefix("Melodi ") if name.startswith("Melodi") else ""


def baselines() -> Recipe:
    rows = [
        Row(name, shape, numbers.THIRTEEN_LAYERS[name], kind_of(name), note=sizes_of(name))
        for name, shape in MODELS.items()
    ]
    rows.append(Row("no memory", Shape("no-memory")))
    for name, shape in MODELS.items():
        layer = (6,) if shape.system in ("melodi", "memorizing") else shape.long_layers
        smaller = replace(shape, depth=12, long_layers=layer)
        series = f"{kind_of(name)}, 12 layers"
        label = f"{name}, 12 layers"
        note = sizes_of(name)
        rows.append(Row(label, smaller, numbers.TWELVE_LAYERS[name], series, note=note))
    thirteen, twelve = "Sec. 3.3, Table 3", "Appendix C, Table 5"
    crossing = [
        Claim(("Melodi S192+L32, 12 layers",), (name,), "Appendix C, second paragraph")
        for name in ("Transformer-XL", "Block-Recurrent")
    ]
    claims = [*table_claims("", thirteen), *table_claims(", 12 layers", twelve), *crossing]
    return Recipe(
        name="baselines",
        title="Tables 3 and 5: comparison with the baselines",
        rows=tuple(rows),
        reference=DEFAULT,
        claims=tuple(claims),
        ablation=False,
        remarks=(
            "On C4 the paper's own numbers have Memorizing before Melodi S128+L64, and with 12 "
            "layers PG-19 (Meena) too.",
            "The row without memory is not in the paper: it is the floor.",
        ),
    )


def table_claims(suffix: str, where: str) -> list[Claim]:
    """What the paper says of Table 3, and again of each half of Table 5."""
    orders = [
        ("Melodi S192+L32", "Transformer-XL", 1.0),
        ("Melodi S192+L32", "Block-Recurrent", 1.0),
        ("Melodi S128+L64", "Memorizing", 8.0),
        ("Melodi S192+L96", "Memorizing", 5.0),
    ]
    claims = []
    for a, b, times in orders:
        sides = ((a + suffix,), (b + suffix,))
        claims.append(Claim(*sides, where))
        how = f"{times:g} times less memory" if times > 1 else "less memory"
        text = f"{a}{suffix} has {how} than {b}{suffix}"
        claims.append(Claim(*sides, where, text, "memory", times))
    better, worse = f"Melodi S192+L96{suffix}", f"{DEFAULT}{suffix}"
    return [*claims, Claim((better,), (worse,), where)]


def longer_windows() -> Recipe:
    rows = []
    for (name, window), paper in numbers.LONGER_WINDOWS.items():
        shape = replace(MODELS[name], window=window)
        note = sizes_of(name) or str(window)
        rows.append(Row(windowed(name, window), shape, paper, kind_of(name), note=note))
    longer = [(name, w) for name, w in numbers.LONGER_WINDOWS if w > 512]
    stable = [key for key in longer if key != ("Memorizing", 2048)]
    where = "Appendix C, Table 6"
    claims = [
        Claim((windowed(melodi, 512),), (windowed(name, window),), where)
        for melodi in MELODI
        for name, window in stable
    ]
    for system in BASELINES:
        windows = [512, *[w for name, w in stable if name == system]]
        claims += ordered([windowed(system, w) for w in windows], "Appendix C, last paragraph")
    return Recipe(
        name="longer-windows",
        title="Table 6: baselines with longer windows",
        rows=tuple(rows),
        reference=windowed(DEFAULT, 512),
        claims=tuple(claims),
        ablation=False,
        remarks=("Memorizing with a window of 2048 was not stable in the paper.",),
    )


def windowed(name: str, window: int) -> str:
    return f"{name}, window {window}"


def window_size() -> Recipe:
    models = {**{name: MODELS[name] for name in BASELINES}, "Melodi S128": Shape(long=0)}
    models |= {name: MODELS[name] for name in ("Melodi S192+L32", DEFAULT)}
    grid = (512, 256, 128)
    rows = [
        Row(windowed(name, w), replace(shape, window=w), {}, name, w)
        for name, shape in models.items()
        for w in grid
    ]
    where = "Sec. 3.4, Fig. 6"
    claims = [
        Claim((windowed(DEFAULT, w),), (windowed(name, w),), f"{where} left")
        for name in BASELINES
        for w in grid
    ]
    for long in ("Melodi S192+L32", DEFAULT, "Memorizing"):
        for short in ("Melodi S128", "Transformer-XL", "Block-Recurrent"):
            for w in grid[1:]:
                better = (windowed(long, w), windowed(short, 512))
                worse = (windowed(short, w), windowed(long, 512))
                text = f"{long} loses less than {short} from window 512 to {w}"
                claims.append(Claim(better, worse, f"{where} right", text))
    return Recipe(
        name="window-size",
        title="Figure 6: shorter windows",
        rows=tuple(rows),
        reference=windowed(DEFAULT, 512),
        claims=tuple(claims),
        axis="window of the paper, tokens",
        axis_scale="log2",
        remarks=(
            "Half the window has half of S and L and twice the queue, so that the covered history "
            "stays; states of Block-Recurrent and slots of Memorizing stay as they are. That and "
            "the choice of the two Melodi variants with long-term memory are our inference. Where "
            "L would be less than one token it is one, and the queue as much shorter.",
            "The paper compares increments of perplexity; here they are of nats per token.",
        ),
    )


def systems() -> Recipe:
    names: dict[System, str] = {
        "melodi": DEFAULT,
        "memorizing": "Memorizing",
        "transformer-xl": "Transformer-XL",
        "block-recurrent": "Block-Recurrent",
        "compressive": "Compressive",
        "autocompressor": "AutoCompressor",
        "rmt": "RMT",
        "infini": "Infini-attention",
        "armt": "ARMT",
        "no-memory": "no memory",
    }
    rows = [Row(name, Shape(system), {}, name) for system, name in names.items()]
    whole = [
        Row(name, Shape(short=WINDOW, long=long), {}, name)
        for name, long in (("Melodi S512", 0), ("Melodi S512+L16", 16))
    ]
    cache, nothing = "Transformer-XL", "no memory"
    remembering = [row.label for row in (*rows, *whole) if row.label != nothing]
    claims = [Claim((name,), (nothing,), "is its memory worth anything") for name in remembering]
    claims += [
        Claim((name,), (cache,), "is it worth more than a cache")
        for name in remembering
        if name != cache
    ]
    return Recipe(
        name="systems",
        title="All memory systems at equal parameters and tokens",
        rows=(*rows, *whole),
        reference=DEFAULT,
        claims=tuple(claims),
        asked="What each memory is worth",
        ablation=False,
        equal=True,
        remarks=(
            "Beyond the paper: it has no numbers of these rows together, and does not claim what "
            "is asked below.",
            "Melodi S512 compresses nothing: it hands on as many tokens as a window has, in half "
            "of Transformer-XL's floats, and has no long-term memory. S512+L16 has one, and still "
            "fewer floats than Transformer-XL.",
        ),
    )
