"""Files that are whole or absent, whenever the machine stops, and that can be checked.

- Every file is written beside its place and then moved there, by `replacing`; metrics alone are
  added to, line by line.
- Tensors are safetensors: no code runs on loading. Their checksum is in the header; a file of ours
  that has lost it is refused. Tensors are copied into memory of their own, because the last bit of
  a product depends on its inputs' alignment.
- JSON is JSON: numbers that are not finite, which it does not have, are written as null.
- A folder that is being written to is locked: `locked`.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

CHECKSUM = "checksum"
"""Where the header of a file of tensors has the checksum of what it holds."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a place to write to; afterwards the file has its new contents, or else its old ones. A
    link stays one, and who may read the file stays as it was; what is no file, a device say, is
    left alone."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a file: choose another place")
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        # safetensors writes files that only their owner can read.
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~umask()
        sync(partial)
        partial.chmod(mode)
        partial.replace(path)
        sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json_text(value, indent=2))


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON for strict readers."""
    return json.dumps(_with_nulls(value), indent=indent, allow_nan=False)


def _with_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_nulls(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): it is damaged") from None


def read_object(path: Path, *keys: str) -> dict[str, Any]:
    """A JSON object that has these keys."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object")
    for key in keys:
        if key not in found:
            raise ValueError(f"{path} is damaged: it lacks {key!r}")
    return found


def write_tensors(
    path: Path,
    tensors: "Mapping[str, Tensor]",
    header: dict[str, str] | None = None,
    whole: "Callable[[Tensor], Tensor] | None" = None,
) -> None:
    """Tensors from any device, with a header of strings; the checksum of both is added to it.

    One after the other, by name, is brought to the host, by `whole` if it is not all here.
    """
    import torch

    header = header or {}
    # Where each begins: the wider numbers first, so that all are aligned.
    layout: dict[str, dict[str, Any]] = {}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        start, end = end, end + tensor.numel() * tensor.itemsize
        about = {"dtype": _type_name(tensor), "shape": list(tensor.shape)}
        layout[name] = {**about, "data_offsets": [start, end]}
    with unwritable_named(path), replacing(path) as partial, partial.open("wb") as file:
        digest = _digest_of(header)
        size = len(_beginning({**header, CHECKSUM: digest.hexdigest()}, layout))
        for name in sorted(tensors):
            tensor = tensors[name].detach()
            tensor = tensor if whole is None else whole(tensor)
            data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            _add_to(digest, name, tensor, data)
            file.seek(size + layout[name]["data_offsets"][0])
            file.write(data)
        file.seek(0)
        file.write(_beginning({**header, CHECKSUM: digest.hexdigest()}, layout))


@contextlib.contextmanager
def unwritable_named(path: Path) -> Iterator[None]:
    """A failed write, on a full disk say, does not say where."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from None


def _beginning(header: Mapping[str, str], layout: Mapping[str, Any]) -> bytes:
    """What stands before the data of a safetensors file."""
    text = json.dumps({"__metadata__": dict(header), **layout}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _type_name(tensor: "Tensor") -> str:
    """As safetensors calls it: F32, BF16, I64, …"""
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind == "bool":
        return "BOOL"
    for name, letter in (("bfloat", "BF"), ("float", "F"), ("uint", "U"), ("int", "I")):
        if kind.startswith(name):
            return letter + kind.removeprefix(name)
    raise ValueError(f"tensors of {tensor.dtype} cannot be stored: give another type")


def read_tensors(path: Path, sealed: bool = True) -> "tuple[dict[str, str], dict[str, Tensor]]":
    """The header and the tensors, each in memory of its own; their checksum must match.

    Files that others may have made are read with `sealed=False`: they need no checksum, but one
    that is there must match. The file is opened once: if another takes its place meanwhile, what is
    read is the old one, whole.
    """
    from safetensors.torch import load

    with _named_errors(path):
        data = path.read_bytes()
        found = load(data)
    header = _metadata(data)
    del data
    tensors = {name: found.pop(name).clone() for name in sorted(found)}
    seal = header.pop(CHECKSUM, None)
    if seal is None and sealed:
        raise ValueError(f"{path} has no checksum: it is damaged, or melodi did not write it")
    if seal not in (None, _checksum_of(header, tensors)):
        raise ValueError(f"{path} is damaged: its checksum differs from what it holds")
    return header, tensors


def read_header(path: Path) -> dict[str, str]:
    """What a file of tensors says of itself, without reading it all."""
    from safetensors import safe_open

    with _named_errors(path), safe_open(path, framework="pt") as file:
        return {key: value for key, value in (file.metadata() or {}).items() if key != CHECKSUM}


@contextlib.contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except FileNotFoundError:
        if path.exists():  # what may not be read, the library calls missing
            raise PermissionError(errno.EACCES, "no permission", str(path)) from None
        raise FileNotFoundError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder: give a file") from None
    except PermissionError:
        raise
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is not a whole safetensors file ({error}): it is damaged, or something else"
        ) from None


def _metadata(data: bytes) -> dict[str, str]:
    """The strings in the header of a whole file: the library gives them of paths only."""
    size = int.from_bytes(data[:8], "little")
    return dict(json.loads(data[8 : 8 + size]).get("__metadata__") or {})


def _checksum_of(header: Mapping[str, str], tensors: "Mapping[str, Tensor]") -> str:
    """Of the header, and of the tensors' names, types, shapes and contents."""
    import torch

    digest = _digest_of(header)
    for name, tensor in sorted(tensors.items()):
        _add_to(digest, name, tensor, tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _digest_of(header: Mapping[str, str]) -> Any:
    return hashlib.blake2b(json.dumps(header, sort_keys=True).encode(), digest_size=16)


def _add_to(digest: Any, name: str, tensor: "Tensor", data: Any) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
    digest.update(data)


def sync(path: Path) -> None:
    """Waits until what was written to a file or folder has reached the disk."""
    windows = os.name == "nt"
    if windows and path.is_dir():  # cannot be opened there
        return
    handle = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one process at a time works in a folder; the lock ends with the process."""
    try:
        import fcntl
    except ImportError:  # Windows has no such lock: there the user must take care
        yield
        return
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is working in {folder}: wait until it ends, or choose another "
                "folder"
            ) from None
        yield


def umask() -> int:
    """The process's mask for new files, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
