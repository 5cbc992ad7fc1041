"""Compiles token.c with the machine's C compiler, once, and calls it.

What is compiled is kept in the user's cache folder, under a name that says from what: the source,
the compiler's flags, and the instructions of this processor. It runs in the threads of torch's own
OpenMP, which pip's builds for Linux have. Where that or a compiler is missing, or something fails,
`kernel_for` gives None and tokens are read by torch, with the same results up to rounding.
`MELODI_NATIVE=0` in the environment asks for that, too.

The kernel sees addresses: whoever calls it has looked at what is there (`Kernel.fits`).

Shapes as in token.c.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import POINTER, Structure, byref, c_double, c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from melodi.layers.products import Numbers, Product

SOURCE = Path(__file__).with_name("token.c")
COMPILERS = ("cc", "gcc", "clang")
INSTRUCTIONS = {
    "AVX2": ["-mavx2", "-mfma"],
    "AVX512": ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
}
"""By what torch says of the processor; elsewhere what the compiler takes for granted."""
# Sums may be reordered. Not -ffast-math: loading would change how the whole process rounds.
REORDERED = ["-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"]
PLAIN = (Tensor, nn.Parameter)
"""A parameter of another kind of tensor has that kind's type."""
MOST_ROWS = 16
"""Beyond these, products are of matrices, and torch's are faster."""
NARROW: dict[Numbers, int] = {"fp32": 0, "bf16": 2, "int8": 1}
ACTIVATIONS = {"relu": 0, "relu2": 1, "gelu": 2}
"""As token.c has them."""


class CProduct(Structure):
    _fields_ = [
        *[(name, c_void_p) for name in ("weight", "scale", "bias")],
        *[(name, c_int64) for name in ("inputs", "outputs", "stride")],
    ]


class Kernel:
    """token.c for one kind of numbers and of weights."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        real = {torch.float32: c_float, torch.float64: c_double}[dtype]
        names = ("width", "heads", "head_width", "slots", "distances", "activation")
        arrays = ("attention_norm", "ffn_norm", "lengths", "bias")
        products = ("query", "key", "value", "output", "hidden", "ffn_output")
        fields: list[Any] = [(name, c_int64) for name in names]
        fields += [(name, c_void_p) for name in arrays]
        fields += [(name, real) for name in ("query_factor", "epsilon")]
        fields += [(name, CProduct) for name in products]
        self.dtype = dtype
        self.Layer: Any = type("CLayer", (Structure,), {"_fields_": fields})
        counts, tensors = [c_int64], [c_void_p]
        self.begin_token = declared(
            library.begin_token,
            [POINTER(self.Layer), *counts, *tensors * 3, *counts * 4, *tensors * 6],
        )
        self.finish_token = declared(
            library.finish_token, [POINTER(self.Layer), *counts, *tensors * 5]
        )
        self._product = declared(library.product, [POINTER(CProduct), *counts, *tensors * 2])

    def fits(self, *tensors: Tensor) -> bool:
        """Whether these are what the kernel takes addresses for."""
        return all(
            type(tensor) in PLAIN
            and tensor.dtype == self.dtype
            and tensor.device.type == "cpu"
            and tensor.is_contiguous()
            for tensor in tensors
        )

    def product(self, product: Product) -> "NativeProduct":
        return NativeProduct(self, product)

    def multiply(self, about: CProduct, x_BD: Tensor, y_BX: Tensor) -> None:
        self._product(byref(about), len(x_BD), x_BD.data_ptr(), y_BX.data_ptr())


class NativeProduct:
    """`Product` by the kernel; it holds what the kernel points to."""

    def __init__(self, kernel: Kernel, product: Product) -> None:
        self.kernel, self.product = kernel, product
        weight, scale, bias = product.weight_XD.detach(), product.scale_X, product.bias_X
        scale = None if scale is None else scale.to(kernel.dtype)
        bias = None if bias is None else bias.detach()
        self.held = (weight, scale, bias)
        sizes = (product.inputs, product.outputs, weight.stride(0))
        self.about = CProduct(address(weight), address(scale), address(bias), *sizes)

    def __call__(self, x_BD: Tensor) -> Tensor:
        if len(x_BD) > MOST_ROWS or not self.kernel.fits(x_BD):
            return self.product(x_BD)
        y_BX = x_BD.new_empty(len(x_BD), self.about.outputs)
        self.kernel.multiply(self.about, x_BD, y_BX)
        return y_BX


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def declared(function: Any, arguments: list[Any]) -> Any:
    function.argtypes, function.restype = arguments, None
    return function


def kernel_for(numbers: Numbers, *parts: nn.Module) -> Kernel | None:
    """The kernel for what is computed with these parts, if their weights are what it takes."""
    weights = [weight for part in parts for weight in part.parameters()]
    dtype = weights[0].dtype
    if dtype not in (torch.float32, torch.float64) or os.environ.get("MELODI_NATIVE") == "0":
        return None
    kernel = compiled(dtype, numbers)
    return kernel if kernel is not None and kernel.fits(*weights) else None


@functools.cache
def compiled(dtype: torch.dtype, numbers: Numbers) -> Kernel | None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    runtime = openmp()
    if compiler is None or runtime is None:
        return None
    flags = flags_for(dtype, numbers)
    try:
        about = repr((compiler, flags, str(runtime), platform.machine())).encode()
        digest = hashlib.sha256(SOURCE.read_bytes() + about).hexdigest()
        path = cache_folder() / f"token-{digest[:16]}.so"
        with contextlib.suppress(OSError, AttributeError):  # not there yet, or damaged
            return Kernel(ctypes.CDLL(str(path)), dtype)
        build(compiler, flags, runtime, path)
        return Kernel(ctypes.CDLL(str(path)), dtype)
    # Without a home there is a RuntimeError, in a library without our functions an AttributeError.
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError):
        return None


def flags_for(dtype: torch.dtype, numbers: Numbers) -> list[str]:
    double = dtype == torch.float64
    real = [f"-DREAL={'double' if double else 'float'}", f"-DREAL_IS_DOUBLE={int(double)}"]
    instructions = INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), [])
    return [
        "-std=gnu11",
        "-O3",
        "-fPIC",
        *REORDERED,
        *instructions,
        *real,
        f"-DNARROW={NARROW[numbers]}",
    ]


def openmp() -> Path | None:
    """The OpenMP of torch itself: with another one, the threads of two would share the cores."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return found[0] if found else None


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) / "melodi"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise PermissionError(f"others may write to {folder}: what is there is not loaded")
    return folder


def build(compiler: str, flags: list[str], runtime: Path, path: Path) -> None:
    """Under its name when it is whole, whoever else is building it at the same time."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        compiled, linked = Path(folder) / "token.o", Path(folder) / path.name
        for command in (
            [compiler, *flags, "-fopenmp", "-c", str(SOURCE), "-o", str(compiled)],
            [compiler, "-shared", str(compiled), str(runtime), "-lm", "-o", str(linked)],
        ):
            subprocess.run(command, check=True, capture_output=True, timeout=60)
        linked.replace(path)
