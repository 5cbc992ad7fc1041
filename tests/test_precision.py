"""The precision of products: asked of the machine, kept by the run, used wherever a model reads."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_runs import ALONE, CONFIG, make_store, model_config
from zoo import ZOO, make, random_tokens

from melodi import StreamReader, precision
from melodi.cli import main
from melodi.config.training import Execution, TrainConfig
from melodi.data.store import TokenStore
from melodi.layers import transformer
from melodi.precision import autocast, bf16_gain, resolve
from melodi.run import Run
from melodi.training.resume import extended
from melodi.training.trainer import train

CPU = torch.device("cpu")
MODEL = next(iter(ZOO.values()))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return make_store(tmp_path_factory.mktemp("store"))


@pytest.mark.parametrize(("gain", "expected"), [(0.2, "fp32"), (1.1, "fp32"), (2.0, "bf16")])
def test_auto_takes_bf16_only_where_it_is_clearly_faster(
    gain: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is said is kept; only "auto" asks, and a small gain is none."""
    monkeypatch.setattr(precision, "bf16_gain", lambda *_: gain)
    assert resolve("auto", CPU, MODEL) == expected
    assert [resolve(said, CPU, MODEL) for said in ("fp32", "bf16")] == ["fp32", "bf16"]


@pytest.mark.parametrize("supported", [True, False])
def test_auto_asks_a_gpu(supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that only imitates bfloat16 has none."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)
    assert resolve("auto", torch.device("cuda"), MODEL) == ("bf16" if supported else "fp32")


def test_the_measurement_is_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both precisions are tried, at sizes that are done in no time."""
    tried = set()
    linear = F.linear

    def noted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        tried.add((x.dtype, x.size(1), weight.size(0)))
        return linear(x, weight)

    monkeypatch.setattr(F, "linear", noted)
    assert bf16_gain(4096, 16384) > 0
    assert bf16_gain(64, 128) > 0
    types = torch.float32, torch.bfloat16
    assert tried == {(t, w, f) for t in types for w, f in ((256, 1024), (64, 128))}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("enabled", [True, False])
def test_what_products_are_in(dtype: torch.dtype, enabled: bool) -> None:
    """`product_dtype` says what torch does."""
    x = torch.ones(2, 2, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        assert precision.product_dtype(x) == (x @ x).dtype
        assert precision.product_dtype(x.to("meta")) == dtype


@pytest.mark.parametrize("found", ["fp32", "bf16"])
def test_a_run_keeps_what_was_found(
    found: str, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is in the run's config, and a resume with "auto" does not ask again."""
    monkeypatch.setattr(precision, "bf16_gain", lambda *_: 2.0 if found == "bf16" else 0.5)
    config = replace(CONFIG, precision="auto", steps=2, horizon=4)
    train(tmp_path / "run", store, model_config(), config, Execution(), ALONE)
    assert Run(tmp_path / "run").part(TrainConfig, "train").precision == found
    monkeypatch.setattr(precision, "bf16_gain", lambda *_: 1 / 0)
    longer = replace(config, steps=4)
    train(tmp_path / "run", store, model_config(), longer, Execution(), ALONE, resume=True)
    own = Run(tmp_path / "run").part(TrainConfig, "train")
    other = "fp32" if found == "bf16" else "bf16"
    with pytest.raises(ValueError, match=f"precision={other} differs from the run's {found}"):
        extended(own, replace(longer, precision=other))  # type: ignore[arg-type]


def test_validation_is_in_the_precision_of_the_run(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every attention, in steps and in validations, sees what autocast makes of its inputs."""
    seen: dict[bool, set[torch.dtype]] = {True: set(), False: set()}
    linear = F.linear

    def noted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> object:
        result = linear(x, weight, bias)
        seen[torch.is_inference_mode_enabled()].add(result.dtype)
        return result

    monkeypatch.setattr(transformer.F, "linear", noted)
    config = replace(CONFIG, precision="bf16", steps=1)
    train(tmp_path / "run", store, model_config(), config, Execution(), ALONE)
    assert seen == {True: {torch.bfloat16}, False: {torch.bfloat16}}


def test_autocast_is_off_for_float32() -> None:
    x = torch.ones(2, 2)
    with autocast("fp32", CPU):
        assert (x @ x).dtype == torch.float32
    with autocast("bf16", CPU):
        assert (x @ x).dtype == torch.bfloat16


def test_a_reader_computes_in_its_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are bf16 in reading and in writing, what is remembered is float32, and the nats are
    near those of float32."""
    model, ids = make(ZOO["melodi-default"]).float(), random_tokens(1, 14)[0].tolist()
    nats = StreamReader(model).read(ids)
    seen: set[torch.dtype] = set()
    linear = F.linear

    def noted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> object:
        result = linear(x, weight, bias)
        seen.add(result.dtype)
        return result

    monkeypatch.setattr(F, "linear", noted)
    monkeypatch.setattr(precision, "bf16_gain", lambda *_: 2.0)
    reader = StreamReader(model, precision="auto")
    torch.testing.assert_close(reader.read(ids), nats, rtol=0.1, atol=0.1, equal_nan=True)
    assert len(list(reader.generate(5, temperature=0))) == 5
    assert seen == {torch.bfloat16}
    kept = [*reader.state.layers, *(reader.state.open_window or ())]
    assert {tensor.dtype for memory in kept for tensor in memory} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")


def test_unknown_precisions_are_refused_in_one_line() -> None:
    model = make(ZOO["melodi-default"])
    with pytest.raises(ValueError, match="'fp8' is unknown: choose one of fp32"):
        StreamReader(model, precision="fp8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="int8 weights and precision bf16 exclude each other"):
        StreamReader(model, precision="bf16", int8=True)


@pytest.mark.parametrize("command", ["eval run", "read book.txt", "generate"])
def test_commands_refuse_unknown_precisions(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--precision", "fp8"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "fp8" in line


def test_an_evaluation_says_its_precision(
    store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both precisions give nearly the same perplexity, and the record says which it was."""
    run = tmp_path / "run"
    train(run, store, model_config(), replace(CONFIG, steps=1), Execution(), ALONE)
    records = []
    for said in ("fp32", "bf16"):
        main(["eval", str(run), "--precision", said, "--threads", "1", "--json"])
        records.append(json.loads(capsys.readouterr().out))
    assert [record["precision"] for record in records] == ["fp32", "bf16"]
    first, second = (record["perplexity"] for record in records)
    assert first != second
    assert second == pytest.approx(first, rel=0.02)
