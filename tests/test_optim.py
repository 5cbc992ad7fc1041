"""The optimizers: Adafactor equals optax, every parameter has its group, and state survives."""

import copy
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from zoo import KINDS, ZOO, random_tokens

from melodi import LanguageModel, ModelConfig
from melodi.config import PRESETS
from melodi.config.training import OptimizerConfig
from melodi.layers.block_recurrent import RecurrentState
from melodi.layers.gate import Gate
from melodi.layers.melodi import TokenMixer
from melodi.layers.transformer import AttentionScale
from melodi.sharded import gather
from melodi.training import optimizers
from melodi.training.optimizers import Adafactor, Muon, make_optimizer, schedule
from melodi.training.parameters import flatten_state, parameter_groups, restore_state

OPTAX = Path(__file__).parent / "golden" / "official_adafactor.npz"
# Each parameter's number in the random seeds of its gradients; the first of them was cut.
OPTAX_NAMES = {"matrix": 1, "mixer": 2, "scalar": 3, "vector": 4, "zeros": 5}
OPTIMIZERS = ("adafactor", "adamw", "muon")

# Wide enough for factored moments; no dimension but the width is even, so that shards differ, and
# the gate has a single entry, so that one of two ranks has none of it.
WIDE = replace(
    KINDS["melodi"], width=128, num_heads=1, head_width=129, ffn_width=131, vocab_size=135
)


def config_of(name: str) -> OptimizerConfig:
    return OptimizerConfig(
        name, 0.01, 0.001, 3, weight_decay=0.1, gate_multiplier=2.0, mixer_multiplier=0.5
    )  # type: ignore[arg-type]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = schedule(step, 0.01, 0.001, 3, 20) * group["multiplier"]
        optimizer.zero_grad()
        tokens = random_tokens(2, 13, seed=step)
        logits, _ = model(tokens, model.empty_state(2))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()


def assert_displacement(ours: np.ndarray, theirs: np.ndarray, before: np.ndarray) -> None:
    """To 1e-5 of the displacement and the rounding of the parameter itself."""
    displacement = np.abs(theirs.astype(np.float64) - before).max()
    error = np.abs(ours.astype(np.float64) - theirs).max()
    assert error <= 1e-5 * displacement + np.abs(np.spacing(theirs)).max()


def test_adafactor_equals_optax() -> None:
    """Sixty updates of optax, with their learning rates, to 1e-5 of the displacement."""
    golden = np.load(OPTAX)
    before = {name: golden[f"before/{name}"] for name in OPTAX_NAMES}
    parameters = {name: nn.Parameter(torch.tensor(array)) for name, array in before.items()}
    optimizer = Adafactor(parameters.values(), lr=0.0)
    for i in range(60):
        lr = optimizer.param_groups[0]["lr"] = schedule(i + 1, 0.01, 0.001, 10, 60)
        assert lr == pytest.approx(golden["learning_rate"][i], rel=1e-6)
        for name, parameter in parameters.items():
            seed = 100 * i + OPTAX_NAMES[name]
            noise = np.random.default_rng(seed).normal(size=parameter.shape)
            value = parameter.detach().numpy()
            grad = noise * 10.0 ** ((i % 5) - 3) + 0.3 * value
            parameter.grad = torch.from_numpy(np.asarray(grad, dtype=np.float32))
        optimizer.step()
        if i + 1 in (1, 2, 10, 60):
            for name, parameter in parameters.items():
                ours, theirs = parameter.detach().numpy(), golden[f"after{i + 1}/{name}"]
                every_eighth = slice(None, None, 8)
                assert_displacement(
                    ours.flatten()[every_eighth], theirs, before[name].flatten()[every_eighth]
                )


def adafactor_in_numpy(w: np.ndarray, grads: list[np.ndarray], lrs: list[float]) -> np.ndarray:
    """The equations of golden/README.md, with the second moment written out in full."""
    order = np.argsort(w.shape, kind="stable")
    factored = w.ndim > 1 and w.shape[order[-2]] >= 128
    v = r = c = m = 0.0
    for i, (g, lr) in enumerate(zip(grads, lrs, strict=True)):
        beta, q = 1 - (i + 1) ** -0.8, g**2 + 1e-30
        v = beta * v + (1 - beta) * q
        if factored:
            r = beta * r + (1 - beta) * q.mean(order[-1], keepdims=True)
            c = beta * c + (1 - beta) * q.mean(order[-2], keepdims=True)
            v_hat = r * c / r.mean(order[-2], keepdims=True)
        u = g / np.sqrt(v_hat if factored else v)
        u = u / max(1, np.sqrt(np.mean(u**2))) * lr * max(np.sqrt(np.mean(w**2)), 1e-3)
        m = 0.9 * m + 0.1 * u
        w = w - m
    return w


@pytest.mark.parametrize(
    "shape", [(), (5,), (3, 4), (127, 300), (130, 140), (140, 130), (3, 128, 128, 2), (129, 2, 130)]
)
def test_adafactor_equals_its_equations(shape: tuple[int, ...]) -> None:
    """In float64, for every rank, with a gradient of zero among them."""
    random = np.random.default_rng(0)
    before = random.normal(size=shape) * 0.1
    grads = [random.normal(size=shape) * 10.0**-i for i in (0, 4, 9, 1)] + [np.zeros(shape)]
    lrs = [0.01, 0.02, 0.03, 0.02, 0.01]
    parameter = nn.Parameter(torch.tensor(before))
    optimizer = Adafactor([parameter], lr=0.0)
    for grad, lr in zip(grads, lrs, strict=True):
        parameter.grad = torch.tensor(grad)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    after = parameter.detach().numpy()
    np.testing.assert_allclose(after, adafactor_in_numpy(before, grads, lrs), rtol=0, atol=1e-13)


def test_adafactor_keeps_the_gradient_and_only_tensors() -> None:
    """The update writes over no gradient, and the state of a matrix is a row and a column of it."""
    parameter = nn.Parameter(torch.randn(130, 140))
    parameter.grad = torch.randn(130, 140)
    grad = parameter.grad.clone()
    optimizer = Adafactor([parameter], lr=0.1)
    optimizer.step()
    assert parameter.grad.equal(grad)
    shapes = {key: tuple(value.shape) for key, value in optimizer.state[parameter].items()}
    assert shapes == {"step": (), "momentum": (130, 140), "row": (130, 1), "column": (1, 140)}


def test_weight_decay_means_the_same_in_all_three() -> None:
    """With a gradient of zero, matrices shrink by the learning rate times the decay; others not."""
    for name in OPTIMIZERS:
        model = LanguageModel(KINDS["melodi"])
        before = copy.deepcopy(model)
        optimizer = make_optimizer(model, config_of(name))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        key = "layers.0.block.key.weight"
        shrunk = before.get_parameter(key) * (1 - 0.01 * 0.1)
        torch.testing.assert_close(model.get_parameter(key), shrunk, rtol=1e-6, atol=0)
        assert model.embedding.weight.equal(before.embedding.weight)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("shape", [(40, 90), (90, 40), (64, 64)])
def test_muon_equals_torch(shape: tuple[int, int]) -> None:
    """Up to torch's rounding of the products to bfloat16."""
    generator = torch.Generator().manual_seed(0)
    ours = nn.Parameter(torch.randn(shape, generator=generator))
    before = ours.detach().clone()
    theirs = nn.Parameter(before.clone())
    optimizers = (
        Muon([ours], lr=0.1, momentum=0.9, weight_decay=0.2),
        torch.optim.Muon(
            [theirs], lr=0.1, momentum=0.9, weight_decay=0.2, adjust_lr_fn="match_rms_adamw"
        ),
    )
    for _ in range(4):
        ours.grad = theirs.grad = torch.randn(shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()
    assert (ours - theirs).norm() < 0.02 * (theirs - before).norm()


@pytest.mark.parametrize("half", [False, True])
def test_muon_takes_small_matrices_together(half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each moves as it would alone: the same, up to the rounding of its products."""
    shapes = [(8, 24), (24, 8), (8, 24), (16, 16), (8, 24)]

    def moved(most: int) -> list[Tensor]:
        monkeypatch.setattr(optimizers, "TOGETHER", most)
        generator = torch.Generator().manual_seed(0)
        weights = [nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
        optimizer = Muon(weights, lr=0.1, half=half)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            optimizer.step()
        return [weight.detach() for weight in weights]

    alone, some, all_ = moved(1), moved(2 * 8 * 24), moved(1 << 20)
    step = 0.1 * 0.2 * math.sqrt(24)
    for one, *others in zip(alone, some, all_, strict=True):
        for other in others:
            assert (other - one).abs().max() < (0.05 if half else 1e-5) * step


def test_the_precision_of_a_run_is_that_of_muon() -> None:
    """In bfloat16 another step than in float32, and nearly the same."""
    torch.manual_seed(0)
    model = LanguageModel(KINDS["melodi"])
    before = copy.deepcopy(model.state_dict())
    moved = []
    for precision in ("fp32", "bf16"):
        model.load_state_dict(before)
        optimizer = make_optimizer(model, config_of("muon"), precision)
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight).cumsum(0).sin()
        optimizer.step()
        moved.append(model.layers[0].block.query.weight - before["layers.0.block.query.weight"])
    assert 0 < (moved[1] - moved[0]).norm() < 0.1 * moved[0].norm()


def test_schedule() -> None:
    """Linear to the cosine's value at the end of warm-up, then the cosine, then the floor."""
    rate = [schedule(step, 0.01, 0.001, 1000, 500_000) for step in range(500_002)]
    assert rate[0] == 0
    assert rate[500] == pytest.approx(rate[1000] / 2)
    assert rate[1000] == max(rate) == pytest.approx(0.01, rel=1e-4)
    assert rate[250_000] == pytest.approx((0.01 + 0.001) / 2)
    assert rate[500_000] == rate[500_001] == pytest.approx(0.001)
    assert schedule(1, 0.01, 0.001, 0, 100) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("config", [*PRESETS.values(), *ZOO.values()], ids=[*PRESETS, *ZOO])
def test_every_parameter_is_in_the_group_of_its_module(config: ModelConfig) -> None:
    """Exactly once; only matrices and mixers decay."""
    with torch.device("meta"):
        model = LanguageModel(config)
    expected: dict[str, set[int]] = {
        "embeddings": {id(model.embedding.weight), id(model.table_SD)},
        "gates": set(),
        "matrices": set(),
        "mixers": set(),
    }
    for module in model.modules():
        if isinstance(module, nn.Linear):
            expected["matrices"].add(id(module.weight))
        elif isinstance(module, TokenMixer):
            expected["mixers"].add(id(module.weight))
        elif isinstance(module, RecurrentState):
            expected["embeddings"] |= {id(module.initial), id(module.position)}
            expected["gates"].add(id(module.gate))
        elif isinstance(module, Gate):
            expected["gates"].add(id(module.logit))
        elif isinstance(module, AttentionScale):
            expected["gates"].add(id(module.factor))
    everything = {id(parameter) for parameter in model.parameters()}
    expected["vectors"] = everything - set().union(*expected.values())

    groups = parameter_groups(model, weight_decay=0.1)
    assert sum(len(group["params"]) for group in groups) == len(everything)
    ours = {group["name"]: {id(p) for p in group["params"]} for group in groups}
    assert ours == {name: ids & everything for name, ids in expected.items() if ids & everything}
    decays = {group["name"]: group["weight_decay"] for group in groups}
    assert decays == {name: 0.1 if name in ("matrices", "mixers") else 0.0 for name in ours}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gates_and_mixers_have_their_own_rates(name: str) -> None:
    groups = make_optimizer(LanguageModel(WIDE), config_of(name)).param_groups
    assert {group["name"]: group["multiplier"] for group in groups} == {
        "matrices": 1.0,
        "mixers": 0.5,
        "embeddings": 1.0,
        "gates": 2.0,
        "vectors": 1.0,
    }
    assert all(group["lr"] == 0.01 * group["multiplier"] for group in groups)


@pytest.mark.parametrize("way", ["flat", "state_dict"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 5])
def test_resume_is_exact(name: str, way: str, steps: int) -> None:
    """Stop, save, load into a new optimizer and go on equals never stopping, bit for bit."""
    torch.manual_seed(0)
    whole = LanguageModel(WIDE)
    optimizer = make_optimizer(whole, config_of(name))
    train(whole, optimizer, range(1, 1 + steps))
    part = copy.deepcopy(whole)
    other = make_optimizer(part, config_of(name))
    if way == "flat":
        flat = flatten_state(optimizer, whole)
        assert bool(flat) == bool(steps)
        restore_state(other, part, safetensors.torch.load(safetensors.torch.save(flat)))
    else:
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(whole, optimizer, range(1 + steps, 6 + steps))
    train(part, other, range(1 + steps, 6 + steps))
    for key, parameter in whole.named_parameters():
        assert parameter.equal(part.get_parameter(key)), key
    ours, theirs = flatten_state(optimizer, whole), flatten_state(other, part)
    assert ours.keys() == theirs.keys()
    assert all(ours[key].equal(theirs[key]) for key in ours)


def test_numbers_in_the_state_survive() -> None:
    """They come back as the numbers they were, not as tensors."""
    model = LanguageModel(KINDS["melodi"])
    optimizer = make_optimizer(model, config_of("adafactor"))
    numbers = {"step": 2**40, "rate": 0.1, "seen": True}
    optimizer.state[model.embedding.weight] = dict(numbers)
    flat = flatten_state(optimizer, model)
    assert "embedding.weight/step:int" in flat
    other = make_optimizer(model, config_of("adafactor"))
    restore_state(other, model, flat)
    restored = other.state[model.embedding.weight]
    assert restored == numbers
    assert [type(value) for value in restored.values()] == [int, float, bool]


def test_state_is_a_copy() -> None:
    """Training on changes neither what was saved nor what was loaded from."""
    model = LanguageModel(WIDE)
    optimizer = make_optimizer(model, config_of("adafactor"))
    train(model, optimizer, range(1, 3))
    flat = flatten_state(optimizer, model)
    kept = {key: value.clone() for key, value in flat.items()}
    train(model, optimizer, range(3, 5))
    restore_state(optimizer, model, flat)
    train(model, optimizer, range(3, 5))
    assert all(value.equal(kept[key]) for key, value in flat.items())


def test_refuses_state_of_another_model() -> None:
    model = LanguageModel(KINDS["melodi"])
    optimizer = make_optimizer(model, config_of("adafactor"))
    with pytest.raises(ValueError, match=r"'head.weight/step' belongs to no parameter"):
        restore_state(optimizer, model, {"head.weight/step": torch.zeros(())})
    with pytest.raises(ValueError, match=r"\(3, 4\) does not fit .* \(23, 12\)"):
        restore_state(optimizer, model, {"embedding.weight/momentum": torch.zeros(3, 4)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "sgd"}, "'sgd' is unknown: choose one of adafactor, adamw, muon"),
        ({"floor": 0.1}, "floor=0.1 is not between 0 and peak=0.01"),
        ({"warmup": -1}, "warmup=-1 must be at least 0"),
        ({"betas": (0.9, 1.0)}, "must be at least 0 and below 1"),
    ],
)
def test_refuses_impossible_settings(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(config_of("adamw"), **changes)


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {key: gather(parameter).detach() for key, parameter in model.named_parameters()}


def compare_sharded_with_whole(rank: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def shard(model: LanguageModel) -> LanguageModel:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for name in OPTIMIZERS:
        torch.manual_seed(0)
        whole = LanguageModel(WIDE)
        start = copy.deepcopy(whole)
        whole_optimizer = make_optimizer(whole, config_of(name))
        train(whole, whole_optimizer, range(1, 4))

        sharded = shard(copy.deepcopy(start))
        optimizer = make_optimizer(sharded, config_of(name))
        train(sharded, optimizer, range(1, 4))
        ours, theirs = whole_parameters(sharded), whole_parameters(whole)
        for key in theirs:
            torch.testing.assert_close(
                ours[key], theirs[key], rtol=0, atol=2e-6, msg=lambda m, at=(name, key): f"{at} {m}"
            )
        flat = flatten_state(optimizer, sharded)
        assert flat.keys() == flatten_state(whole_optimizer, whole).keys()

        again = LanguageModel(WIDE)
        again.load_state_dict(ours)
        again = shard(again)
        other = make_optimizer(again, config_of(name))
        restore_state(other, again, flat)
        train(sharded, optimizer, range(4, 6))
        train(again, other, range(4, 6))
        ours, theirs = whole_parameters(again), whole_parameters(sharded)
        assert all(ours[key].equal(theirs[key]) for key in theirs), name
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_of_fsdp2_take_the_steps_of_one_process(tmp_path: Path) -> None:
    """To 2e-6, for uneven and empty shards too, and the sharded state resumes bit for bit."""
    torch.multiprocessing.spawn(compare_sharded_with_whole, (str(tmp_path),), nprocs=2)
