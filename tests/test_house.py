"""The rules of the house: which module may import which, and that the README is true."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import melodi

PACKAGE = Path(melodi.__file__).parent
ROOT = PACKAGE.parent
ORDER = [
    *["files", "sharded", "config", "layers", "memory", "boundary", "reading", "model", "data"],
    *["run", "stream", "evaluation", "training", "paper", "meliad", "cli"],
]
"""Each name imports only from names before it; docs/architecture.md tells the same story."""


def imports(path: Path) -> Iterator[str]:
    """Every module of ours that a file imports, in any form and anywhere in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(module: str) -> str:
    """The top-level name of a dotted path; the package itself for `import melodi`."""
    return [*module.split("."), "melodi"][1]


def test_modules_import_only_from_above() -> None:
    """Data flows one way through the package, whatever the form of the import."""
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert rooms - {"__init__", "__main__", "__pycache__", "py"} <= set(ORDER)
    for path in PACKAGE.rglob("*.py"):
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if own in ("__init__", "__main__"):
            continue
        for module in imports(path):
            if module.split(".")[0] == "melodi" and room(module) != "__version__":
                assert room(module) in ORDER, f"{path} imports {module}"
                assert ORDER.index(room(module)) <= ORDER.index(own), f"{path} imports {module}"


def test_the_readme_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python example of the README runs as it stands."""
    readme = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.S)
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    assert (tmp_path / "memory.safetensors").exists()


def test_import_does_nothing() -> None:
    """Importing melodi sets no threads and keeps the heavy coats out."""
    code = (
        "import torch; before = torch.get_num_threads(); import melodi, sys; "
        "assert torch.get_num_threads() == before; "
        "assert not {'tyro', 'rich', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
