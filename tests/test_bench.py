"""`melodi bench`: operations are counted right, noise cancels, the command keeps its word."""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_cli import printed, refused
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from zoo import KINDS, ZOO, cases, make, random_tokens

from melodi import LanguageModel, ModelConfig
from melodi.bench import alternatives, full_attention, runner
from melodi.bench.measure import Task, interleave, ratio, summary
from melodi.bench.operations import (
    EXTRA,
    MANY,
    TRAINING,
    inner,
    memory_read,
    of_window,
    past_pairs,
    visible_pairs,
    weights_read,
)
from melodi.bench.peak import peak_of
from melodi.bench.sizes import PLANS, SIZES, Plan, Size
from melodi.bench.subjects import filled_state, our_subject, read_document, train_on_document
from melodi.cli import main
from melodi.config import kinds
from melodi.reading import Turn
from melodi.sights import view_of_past, view_of_window

TINY = Size(
    {name: replace(config, num_heads=2, head_width=6) for name, config in KINDS.items()},
    rows=2,
    segment_windows=2,
)
SECONDS = Plan(
    kinds=("melodi", "no-memory"),
    speed_seconds=4,
    length_seconds=0.2,
    growth_seconds=0.5,
    lengths=(12, 24),
    positions=(12, 48),
    memory_lengths=(12,),
    peak_seconds=0,
    context=16,
    buffer_mb=1,
)


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every size is tiny and every plan a matter of seconds."""
    for name in SIZES:
        monkeypatch.setitem(SIZES, name, TINY)
    for name in PLANS:
        monkeypatch.setitem(PLANS, name, SECONDS)


def counted(run: Callable[[], object]) -> int:
    """Operations that torch counts, with attention as plain products."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@cases(ZOO)
def test_the_count_is_torchs(config: ModelConfig) -> None:
    """Twice our multiply-adds, hidden keys included, are torch's operations, while memory fills and
    when it is full. The k best pairs are read without a product, so torch does not count them."""
    model, rows = make(config).requires_grad_(False), 2
    state = model.empty_state(rows)
    for windows_read in range(4):
        tokens = random_tokens(rows, config.window, seed=windows_read)
        after = []
        with torch.no_grad():
            found = counted(lambda t=tokens, s=state, a=after: a.append(model(t, s)[1]))
        (state,) = after
        wanted = 2 * rows * of_window(config, windows_read, dense=True).all
        slots = min(config.window * windows_read, config.memory_slots)
        if config.answers.empty_memory == "zeros":
            slots = config.memory_slots
        if config.top_k is not None and config.top_k < slots:
            wanted -= 2 * rows * 2 * config.window * config.top_k * inner(config)
        assert found == wanted


@cases(ZOO)
def test_only_keys_that_are_seen_count(config: ModelConfig) -> None:
    """Pairs of self-attention are those of the mask; everything else is the same as when dense."""
    zero, whole = torch.zeros(1, dtype=torch.long), torch.tensor([config.window])
    cpu = torch.device("cpu")
    for windows_read in (0, 1, 2, 50):
        turn = Turn(zero, whole, torch.tensor([windows_read]), zero, config.window)
        for i, kind in enumerate(config.layers):
            writing = config.write_tokens if i <= config.last_writing_layer else 0
            seen = view_of_window(config, kinds.KINDS[kind], turn, writing, cpu).visible_btk
            assert visible_pairs(config, kind, writing, windows_read) == int(seen.sum())
    past = view_of_past(config, kinds.KINDS[config.layers[0]], turn, cpu)
    assert past_pairs(config, 0, MANY, False) == (
        0 if past is None else int(past.visible_btk.sum())
    )
    lean, dense = of_window(config), of_window(config, dense=True)
    assert replace(lean, attention=0) == replace(dense, attention=0)
    assert lean.attention < dense.attention


@cases(KINDS, have=lambda config: config.compressor == "mean")
def test_training_is_three_times_reading(config: ModelConfig) -> None:
    """Exactly, where nothing but pairs is carried; else torch does a little less, because what the
    segment begins with, Memorizing's whole queue for one, has no gradient. The convolution's
    own loss is not counted."""
    model, rows = LanguageModel(config), 3
    wanted = TRAINING * 2 * rows * 2 * of_window(config, dense=True).all
    length = 2 * config.window
    found = counted(lambda: train_on_document(model, rows, length, length))
    assert found == wanted if set(config.layers) <= {"xl", "plain"} else found < wanted
    assert found > (0.85 if "memorizing" in config.layers else 0.9) * wanted


def test_every_kind_is_counted() -> None:
    """A layer kind has a row in the count as well."""
    assert EXTRA.keys() == kinds.KINDS.keys()


def test_a_token_reads_its_weights_and_its_memory() -> None:
    """The floor of generation: block and embedding once, the pairs that are seen, the queue."""
    plain = KINDS["no-memory"]
    parameters = sum(p.numel() for p in LanguageModel(plain).parameters() if p.dim() == 2)
    tables = len(plain.layers) * plain.num_heads * 32
    own_pairs = len(plain.layers) * 2 * inner(plain) * (plain.window + 1) / 2
    assert weights_read(plain) == parameters - tables
    assert memory_read(plain) == own_pairs
    larger = replace(KINDS["melodi"], long_term_windows=4)
    more = memory_read(larger) - memory_read(KINDS["melodi"])
    assert more == larger.long_term_tokens * 2 * inner(larger)


def test_full_attention_counts_what_torch_counts() -> None:
    """The same relation for the Llama, whose mask hides the half of all pairs that is later."""
    pytest.importorskip("transformers")
    config, length = TINY.reference, 12
    model = full_attention.make_llama(config).requires_grad_(False)
    tokens = random_tokens(1, length)
    found = counted(lambda: full_attention.nats(model, tokens))
    hidden = len(config.layers) * 2 * inner(config) * length * (length - 1) / 2
    assert found == 2 * (length * full_attention.operations(config, length) + hidden)


@cases({name: config for name, config in ZOO.items() if name.endswith("-default")})
def test_filled_memory_is_full(config: ModelConfig) -> None:
    """Every slot is seen, and what is read from it is finite, in training too."""
    model = LanguageModel(config)
    state = filled_state(model, 2)
    for i, kind in enumerate(config.layers):
        row = kinds.KINDS[kind]
        assert row.filled_past(config, int(state.windows_B[0])) == row.past(config), i
    subject = our_subject("x", config, replace(TINY, models={"melodi": config}))
    assert [task.metric for task in subject.tasks(TINY)] == ["train", "read", "generate"]
    assert all(task.sample() > 0 for task in subject.tasks(TINY))
    loss, _ = model.loss(random_tokens(2, 12), random_tokens(2, 12), state)
    assert torch.isfinite(loss)


def test_summaries() -> None:
    """Median and quartiles; the extremes where samples are few."""
    assert (summary([3, 1, 2]).median, summary([3, 1, 2]).low, summary([3, 1, 2]).high) == (2, 1, 3)
    many = summary([5, 1, 2, 3, 4, 100, 3])
    assert (many.median, many.low, many.high, many.count) == (3, 2.5, 4.5, 7)
    assert many.spread == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="at least one sample"):
        summary([])


def test_noise_of_a_round_cancels() -> None:
    """Whatever slows a whole round down leaves the ratio as it is; rounds are never mixed."""
    slow = [1.0, 0.1, 0.7, 0.3]
    found = ratio([2 * s for s in slow], slow)
    assert (found.median, found.low, found.high) == (2, 2, 2)
    with pytest.raises(ValueError, match="not of the same rounds"):
        ratio([1.0, 2.0], [1.0])


def test_tasks_take_turns() -> None:
    """All tasks have as many samples, none of the first round; a failure is noted once, unless it
    is our own; without time for more the first round counts."""
    calls: list[str] = []
    notes: list[str] = []

    def sample(name: str) -> float:
        calls.append(name)
        if name == "bad":
            raise RuntimeError("broken\nin two lines")
        return float(len(calls))

    tasks = [Task(n, "x", lambda n=n: sample(n), optional=n == "bad") for n in ("a", "bad", "b")]
    found = interleave(tasks, 0.05, notes.append, "test")
    assert [measured.task.name for measured in found] == ["a", "b"]
    assert calls.count("bad") == 1
    assert len(found[0].samples) == len(found[1].samples) == calls.count("a") - 1
    assert min(found[0].samples) > 3
    assert notes == ["bad: x failed: RuntimeError: broken in two lines"]
    (once,) = interleave([replace(tasks[0], needed=True)], 0, notes.append, "test")
    assert len(once.samples) == 1
    with pytest.raises(RuntimeError):
        interleave([replace(tasks[1], optional=False, needed=True)], 0, notes.append, "test")


def test_what_does_not_fit_is_left_out() -> None:
    """What no time is left for is left out with a line, but not what is needed for the others."""
    notes: list[str] = []
    tasks = [Task("ours", "x", lambda: 1.0, needed=True), Task("other", "x", lambda: 1.0)]
    assert [m.task.name for m in interleave(tasks, -1, notes.append, "test")] == ["ours"]
    assert notes == ["other: x left out, no time is left"]


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_models_of_a_size_are_comparable(size: Size) -> None:
    """One width, window, vocabulary and depth for all kinds; the layer that costs as much as two
    stands for two, as in the paper."""
    for config in size.models.values():
        for name in ("width", "window", "vocab_size", "num_heads"):
            assert getattr(config, name) == getattr(size.reference, name)
        assert len(config.layers) + ("recurrent" in config.layers) == len(size.reference.layers)


def test_the_sizes_are_those_of_the_page() -> None:
    """docs/bench.md names these."""
    small, mid = SIZES["small"], SIZES["mid"]
    c = small.reference
    assert (len(c.layers), c.width, c.num_heads, c.window, c.vocab_size) == (6, 256, 4, 128, 4096)
    assert (c.short_term_tokens, c.long_term_tokens, c.long_term_windows) == (32, 16, 128)
    assert (small.rows, small.segment_windows, mid.rows) == (8, 8, 1)
    c = mid.reference
    assert (len(c.layers), c.width, c.window, c.vocab_size) == (13, 512, 512, 32_000)
    assert (c.short_term_tokens, c.long_term_tokens) == (128, 64)
    assert c.layers.index("long") == 8


@pytest.mark.parametrize("name", alternatives.ALTERNATIVES)
def test_alternatives_work_or_say_why_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each does all it claims at a tiny size; one that is absent, or fails, is one line."""
    notes: list[str] = []
    subject = alternatives.make_alternative(name, TINY, 8, notes.append)
    assert (subject is None) == (len(notes) == 1)
    for task in () if subject is None else subject.tasks(TINY):
        assert task.sample() > 0
    monkeypatch.setattr(alternatives, "find_spec", lambda _: None)
    assert alternatives.make_alternative(name, TINY, 8, notes.append) is None
    assert "is not installed: pip install '.[bench]'" in notes[-1]
    monkeypatch.setattr(alternatives, "find_spec", lambda _: True)
    monkeypatch.setitem(alternatives.ALTERNATIVES, name, ("x", lambda *_: 1 / 0))
    assert alternatives.make_alternative(name, TINY, 8, notes.append) is None
    assert notes[-1] == f"{name}: left out, ZeroDivisionError: division by zero"


@pytest.mark.usefixtures("_tiny")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bench_prints_json(precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All samples, medians and spreads, the machine, the configs; ours is the measure of itself."""
    command = f"bench --quick --json --threads 1 --precision {precision}"
    record = json.loads(printed(capsys, command))
    assert record["config"]["precision"] == precision
    assert {"machine", "config", "speed", "documents", "growth", "peaks", "notes"} <= record.keys()
    assert {"cpu", "capability", "threads", "torch", "commit"} <= record["machine"].keys()
    rows = {(row["name"], row["metric"]): row for row in record["speed"]}
    assert {("machine", "roof"), ("machine", "bandwidth")} <= rows.keys()
    for metric in ("train", "read", "generate"):
        row = rows["melodi", metric]
        assert row["to_melodi"]["median"] == 1
        assert row["count"] == len(row["samples"])
        assert row["low"] <= row["median"] <= row["high"]
        assert rows["no-memory", metric]["share"]["median"] > 0
    assert [row["position"] for row in record["growth"]] == [12, 48]
    assert {row["length"] for row in record["documents"]} == {12, 24}


@pytest.mark.usefixtures("_tiny")
def test_bench_prints_tables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The tables fit in 80 columns; --out gets the record and the picture."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("COLUMNS", "80")
    text = printed(capsys, f"bench --threads 1 --size small --out {tmp_path}/new/folder")
    for title in ("Training", "Reading", "Generation", "Whole documents", "read on and on"):
        assert title in text
    assert max(map(len, text.splitlines())) <= 80
    record = json.loads((tmp_path / "new" / "folder" / "bench.json").read_text())
    assert record["size"] == "small"
    assert (tmp_path / "new" / "folder" / "bench.png").stat().st_size


@pytest.mark.usefixtures("_tiny")
def test_bench_measures_one_part(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not asked for is not measured, and has no table."""
    monkeypatch.setenv("COLUMNS", "80")
    text = printed(capsys, "bench --threads 1 --parts documents")
    assert "Whole documents" in text
    assert "Training" not in text
    assert "read on and on" not in text
    record = json.loads(printed(capsys, "bench --threads 1 --parts growth documents --json"))
    assert record["growth"]
    assert record["documents"]
    assert record["speed"] == record["peaks"] == []


@pytest.mark.usefixtures("_tiny")
def test_bench_measures_some_models(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Melodi is always among them: the others are compared with it."""
    made: list[str] = []
    monkeypatch.setattr(runner, "make_alternative", lambda name, *_: made.append(name))
    command = "bench --threads 1 --parts speed documents --json --models"
    record = json.loads(printed(capsys, f"{command} no-memory 'rmt (PyPI)'"))
    assert {row["name"] for row in record["speed"]} == {"machine", "melodi", "no-memory"}
    assert {row["name"] for row in record["documents"]} == {"melodi"}
    assert made == ["rmt (PyPI)"]
    assert set(record["config"]["models"]) == {"melodi", "no-memory"}


@pytest.mark.usefixtures("_tiny")
def test_what_is_not_installed_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whichever part misses it first."""
    monkeypatch.setattr(alternatives, "find_spec", lambda _: None)
    for parts in ("documents", "speed documents"):
        command = f"bench --threads 1 --parts {parts} --json --models 'full attention'"
        record = json.loads(printed(capsys, command))
        assert record["notes"] == [
            "full attention: left out, transformers is not installed: pip install '.[bench]'"
        ]


@pytest.mark.parametrize(("length", "chunk"), [(64, 16), (40, 16), (8, 16), (16, 16)])
def test_a_document_is_read_to_its_end(length: int, chunk: int) -> None:
    """And no further, whatever is read at once."""
    state = read_document(LanguageModel(KINDS["melodi"]), length, chunk)
    window = state.config.window
    assert int(state.windows_B) * window + int(state.open_B) == length


@pytest.mark.slow
def test_peak_memory_grows_with_the_work() -> None:
    """More rows take more; a document of twice the length does not, once the allocator has found
    places for everything, which takes some segments. In a process of its own."""
    size = Size(
        {"melodi": replace(KINDS["melodi"], width=64, ffn_width=512, window=64)},
        rows=8,
        segment_windows=2,
    )
    few, more, long = (
        peak_of("melodi", "train", length, replace(size, rows=rows), timeout=60)
        for rows, length in ((2, 1024), (64, 1024), (64, 2048))
    )
    assert few + 5 < more
    assert long < 1.3 * more
    with pytest.raises(RuntimeError, match="failed: KeyError"):
        peak_of("none", "train", 128, size, timeout=60)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("bench --threads 0", "--threads 0 must be at least 1"),
        ("bench --threads two", "--threads: 'two' is not a whole number"),
        ("bench --size big", "'big' for argument '--size'"),
        ("bench --quik", "--quick"),
        ("bench --parts memory", "'memory'"),
        ("bench --models melodi llama", "no model is called llama: there are melodi, "),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], command: str, message: str) -> None:
    """One line, before anything is measured."""
    assert message in refused(capsys, command)


def test_a_file_is_no_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A folder that cannot be made is refused before anything is measured."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        main(shlex.split(f"bench --out {tmp_path}/file"))
    assert capsys.readouterr().err.count("\n") == 1
