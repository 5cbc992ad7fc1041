"""Every memory system of the harness does everything that the harness offers.

The laws say what a model computes, the golden numbers that it computes what others do. Here each
preset for a laptop, at a tiny size, goes from the command line to a memory file; and what training
in half precision, in several processes or with gates asks of a kind is asked of all of them.
"""

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from zoo import KINDS, WINDOW, ZOO, cases, random_tokens, remembers

from melodi import LanguageModel, MemoryState, ModelConfig, StreamReader, load
from melodi.cli import main
from melodi.config import PRESETS
from melodi.config.training import recipe
from melodi.layers.gate import Gate
from melodi.training.optimizers import make_optimizer

ROOT = Path(__file__).parents[1]
LAPTOP = [name for name in PRESETS if name.startswith("laptop")]
COMMANDS = {
    **dict.fromkeys(LAPTOP, ""),
    "laptop-infini delta": "--model.infini-update delta",
    "laptop-compressive convolution": "--model.compressor convolution",
    "laptop-rmt causal": "--model.memory-mask causal",
}
PAPER = [
    name for name in PRESETS if re.fullmatch(r"paper-(melodi-s128-l64|(?!melodi).*(?<!-12))", name)
]
"""One preset of each system."""
TINY = (
    "--threads 1 --device cpu --rows 2 --segment-windows 2 --steps 2 --validation-tokens 100 "
    "--model.width 16 --model.num-heads 2 --model.ffn-width 16 --model.window 16"
)
SIZES = {
    "short_term_tokens": 4,
    "long_term_tokens": 2,
    "long_term_windows": 4,
    "recurrent_states": 4,
    "memory_slots": 64,
    "memory_tokens": 4,
    "compressed_slots": 8,
    "compression_rate": 4,
    "associative_width": 4,
}
"""Of memories; a preset has the flags of those that it has."""
GATED = ("long", "recurrent", "memorizing", "infini")
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. "


def flags(name: str) -> list[str]:
    """The preset at a tiny size: two layers, or one of each kind that it has."""
    config = PRESETS[name]
    layers = [*dict.fromkeys(config.layers)]
    sizes = [f"--model.{field}={n}" for field, n in SIZES.items() if getattr(config, field)]
    return [*shlex.split(TINY), *sizes, "--model.layers", *(layers if layers[1:] else layers * 2)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of some windows each, as bytes."""
    folder = tmp_path_factory.mktemp("systems")
    for i in range(6):
        (folder / f"{i}.txt").write_text(f"{i}: {TEXT}" * 2)
    main(shlex.split(f"prepare {folder} --out {folder}/store --tokenizer bytes --workers 1"))
    return folder / "store"


@pytest.mark.parametrize("command", COMMANDS)
def test_from_the_command_line_to_a_memory_file(
    command: str, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training, evaluation with and without memory, generation, and a memory that is saved in the
    middle of a window and goes on as if it had never been."""
    name, run = command.split()[0], str(tmp_path / "run")
    threads = torch.get_num_threads()
    try:
        new = ["--preset", name, "--data", str(store), "--out", run]
        main(["train", *new, *flags(name), *shlex.split(COMMANDS[command])])
        capsys.readouterr()
        main(["eval", run, "--device", "cpu", "--json"])
        record = json.loads(capsys.readouterr().out)
        main(shlex.split(f"generate --run {run} --prompt 'It was' --max-tokens 24 --device cpu"))
        assert capsys.readouterr().out.startswith("It was")
    finally:
        torch.set_num_threads(threads)
    model = load(run)
    kept, dropped = record["perplexity"], record["perplexity_without_memory"]
    assert math.isfinite(kept)
    assert (kept != dropped) == remembers(model.config)

    ids = model.tokenizer.encode(TEXT)
    whole, first = StreamReader(model), StreamReader(model)
    whole.read(ids)
    first.read(ids[:41])
    first.state.save(tmp_path / "memory.safetensors")
    second = StreamReader(model, MemoryState.load(tmp_path / "memory.safetensors"))
    second.read(ids[41:])
    assert second.state.windows_B.tolist() == whole.state.windows_B.tolist() == [len(ids) // 16]
    probe = ids[:5]
    torch.testing.assert_close(second.read(probe), whole.read(probe), rtol=0, atol=1e-5)


def trained(
    config: ModelConfig, windows: int = 2, starts: tuple[bool, bool] = (True, False)
) -> tuple[LanguageModel, MemoryState]:
    """A model as it begins, in single precision, with the gradients of a segment in which some rows
    start a document and the others go on; and the memory after it."""
    torch.manual_seed(0)
    model = LanguageModel(replace(config, dropout=0.0))
    tokens = random_tokens(2, windows * WINDOW)
    _, state = model(tokens, model.empty_state(2))
    loss, state = model.loss(tokens, tokens, state.detach().forget(starts))
    loss.backward()
    return model, state


@cases(ZOO, have=lambda config: config.dialect != "paper")
@pytest.mark.parametrize("starts", [(True, True), (True, False), (False, False)], ids=str)
def test_every_parameter_has_a_gradient_in_two_windows(
    config: ModelConfig, starts: tuple[bool, bool]
) -> None:
    """DDP waits for the gradient of every parameter, in a process whose rows all start documents
    and in one where none does; two windows are the shortest segment in which it is not told to look
    for those without. The dialect of the paper has no parameter that the others lack."""
    model, _ = trained(config, starts=starts)
    assert not [name for name, p in model.named_parameters() if p.grad is None]


@cases(KINDS)
def test_what_is_carried_is_exact_under_autocast(config: ModelConfig) -> None:
    """In half precision training, memory stays in single precision, and gradients are finite and
    near those of single precision."""
    exact, _ = trained(config, windows=3)
    with torch.autocast("cpu", torch.bfloat16):
        model, state = trained(config, windows=3)
    assert {t.dtype for memory in state.layers for t in memory} <= {torch.float32}
    for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        assert (p.grad - q.grad).norm() <= 0.2 * q.grad.norm() + 1e-3, name


@pytest.mark.parametrize("name", LAPTOP)
def test_gates_have_a_rate_of_their_own(name: str) -> None:
    """Every gate of every layer of a preset, and nothing but gates and attention scales, has the
    rate that is asked for, and no weight decay: gates that decay go back to a half."""
    model = LanguageModel(PRESETS[name])
    settings = replace(recipe(name).optimizer, gate_multiplier=10, weight_decay=0.1)
    (group,) = (
        group for group in make_optimizer(model, settings).param_groups if group["name"] == "gates"
    )
    assert group["multiplier"] == 10
    assert group["weight_decay"] == 0
    own = {id(parameter) for parameter in group["params"]}
    gates = {id(module.logit) for module in model.modules() if isinstance(module, Gate)}
    gates |= {id(p) for path, p in model.named_parameters() if path.endswith("state.gate")}
    scales = {id(p) for path, p in model.named_parameters() if path.endswith("scale.factor")}
    assert own == gates | scales
    gated = [kind for kind in PRESETS[name].layers if kind in GATED]
    assert len(gates) == len(gated)


@pytest.mark.parametrize("page", ["README.md", "docs/systems.md"])
def test_the_tables_of_systems_are_the_presets(page: str) -> None:
    """Every family has one row, with the floats of its preset and the parameters that it adds."""
    with torch.device("meta"):
        sizes = {name: LanguageModel(PRESETS[name]).num_parameters for name in PAPER}
    listed = {}
    for line in (ROOT / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        named = [cell.strip("`") for cell in cells if cell.strip("`") in PAPER]
        if named:
            listed[named[0]] = cells
    assert listed.keys() == set(PAPER)
    for name, cells in listed.items():
        assert f"{sum(PRESETS[name].memory_floats()):,}" in cells, name
        more = f"{sizes[name] - sizes['paper-no-memory']:,}"
        assert page == "README.md" or more in [cell.split(" ")[0] for cell in cells], name


def test_the_worked_example_is_the_code() -> None:
    """Every line of Python that CONTRIBUTING.md shows is in the file that it is from."""
    layers, config = ROOT / "melodi" / "layers", ROOT / "melodi" / "config"
    sources = [layers / "infini.py", config / "kinds.py"]
    lines = {line for path in sources for line in path.read_text().splitlines()}
    blocks = re.findall(r"```py\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
    assert blocks
    assert {line for block in blocks for line in block.splitlines()} <= lines
