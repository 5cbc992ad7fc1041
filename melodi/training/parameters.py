"""What each parameter is for, and the optimizer's state as tensors for files.

- The role of a parameter stands beside it, in the `roles` of its module's class. It decides about
  weight decay, the learning rate of gates, and what Muon may take.
- `flatten_state` names every tensor "parameter/key", so that no pickle is needed to save it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from melodi.sharded import gather, shard_like

ROLES = ("matrices", "mixers", "embeddings", "gates", "vectors")
MATRICES = ROLES[:2]
"""What decays, and what Muon takes."""
NUMBERS = {"bool": bool, "int": int, "float": float}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The model's parameters by what they do, in the groups that have any.

    matrices: of linear layers. mixers: over the token axis; these two alone have weight decay.
    embeddings: tables of learned tokens. gates: gates and attention scales. vectors: norms, biases,
    position biases.
    """
    groups: dict[str, list[Tensor]] = {role: [] for role in ROLES}
    for path, parameter in model.named_parameters():
        module, _, name = path.rpartition(".")
        groups[role_of(model.get_submodule(module), name, parameter)].append(parameter)
    return [
        {"name": n, "params": p, "weight_decay": weight_decay if n in MATRICES else 0.0}
        for n, p in groups.items()
        if p
    ]


def role_of(module: nn.Module, name: str, parameter: Tensor) -> str:
    """What the module's class says of its own parameter; else a 2-D `weight` is a matrix."""
    usual = "matrices" if name == "weight" and parameter.dim() == 2 else "vectors"
    role = getattr(type(module), "roles", {}).get(name, usual)
    assert role in ROLES, f"{type(module).__name__}.{name} has the unknown role {role!r}"
    return role


def flatten_state(optimizer: Optimizer, model: nn.Module, whole: bool = True) -> dict[str, Tensor]:
    """A copy of the optimizer's state on the CPU, as "{parameter name}/{state key}".

    Numbers become tensors, with their type after the key: "/step:int". With sharded parameters
    every rank must call this, and gets the whole, or else its own shards.
    """
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                value = (gather(value) if whole else value).detach()
                tensors[f"{name}/{key}"] = value.to("cpu", copy=True).contiguous()
            else:
                kind = type(value).__name__
                assert kind in NUMBERS, f"{name} has {key} of type {kind}"
                dtype = torch.float64 if kind == "float" else None
                tensors[f"{name}/{key}:{kind}"] = torch.tensor(value, dtype=dtype)
    return tensors


def restore_state(optimizer: Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Puts the state that `flatten_state` gave into an optimizer, in place of what it has."""
    parameters = dict(model.named_parameters())
    states: dict[str, dict[str, Any]] = {}
    for path, tensor in tensors.items():
        name, _, key = path.rpartition("/")
        key, _, kind = key.partition(":")
        if name not in parameters:
            raise ValueError(
                f"optimizer state {path!r} belongs to no parameter of the model: "
                "resume with the configuration that the state was saved with"
            )
        _check_shape(path, tensor, parameters[name])
        value = shard_like(tensor, parameters[name]).clone() if not kind else tensor.item()
        states.setdefault(name, {})[key] = NUMBERS[kind](value) if kind else value
    # The optimizer's own loading knows on which device each kind of state has to live.
    saved = optimizer.state_dict()
    ordered = [id(p) for group in optimizer.param_groups for p in group["params"]]
    saved["state"] = {ordered.index(id(parameters[n])): state for n, state in states.items()}
    optimizer.load_state_dict(saved)


def _check_shape(path: str, tensor: Tensor, parameter: Tensor) -> None:
    """Moments have the parameter's shape, except for dimensions that were averaged out."""
    sizes = zip(tensor.shape, parameter.shape, strict=False)
    same_rank = tensor.dim() == parameter.dim()
    if tensor.dim() and not (same_rank and all(a in (1, b) for a, b in sizes)):
        raise ValueError(
            f"optimizer state {path!r} of shape {tuple(tensor.shape)} does not fit a parameter of "
            f"shape {tuple(parameter.shape)}: resume with the configuration that it was saved with"
        )
