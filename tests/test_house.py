"""The rules of the house: who may import whom, which names stay, that the documents are true."""

import ast
import contextlib
import dataclasses
import inspect
import io
import re
import runpy
import shlex
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest
import torch
from test_cli import TINY

import melodi
import melodi.meliad
from melodi import run as runs
from melodi.cli import COMMANDS, main
from melodi.config import PRESETS

PACKAGE = Path(melodi.__file__).parent
ROOT = PACKAGE.parent
ORDER = [
    *["files", "drawing", "sharded", "device", "threads", "config", "precision", "layers"],
    *["memory_file", "memory", "boundary", "reading", "sights", "decoding", "model", "data"],
    *["run", "stream", "evaluation", "training", "meliad", "hf", "prefixes", "lm_eval", "bench"],
    *["paper", "cli"],
]
"""Each name imports only from names before it; docs/architecture.md tells the same story."""
SIBLINGS = {
    "config": ["dialects", "checks", "kinds", "model", "presets", "training"],
    "layers": [
        *["transformer", "frame", "products", "native", "token", "fifo", "growing"],
        *["gate", "queue"],
        *["melodi", "transformer_xl", "block_recurrent", "memorizing"],
    ],
    "data": [
        *["tokenizer", "detokenizer", "text", "corpus", "shards", "store", "splits", "progress"],
        *["vocabulary", "writer", "appender", "prepare", "merge", "segments"],
    ],
    "stream": ["sampling", "source", "spoken", "reader"],
    "evaluation": [
        *["tallies", "intervals", "documents", "drops", "probes", "record", "texts", "contents"],
        *["pages", "tasks", "recall", "curves"],
    ],
    "training": [
        *["distributed", "parameters", "optimizers", "tiny", "checkpoint", "shard_files"],
        *["snapshot", "batches", "learner", "trainer"],
    ],
    "paper": [
        *["costs", "shapes", "scales", "numbers", "recipe", "comparisons", "ablations", "recipes"],
        *["plan", "estimate", "results", "reproduce", "verdicts", "figures", "pages", "report"],
        "plots",
    ],
    "hf": ["modeling", "pieces", "export"],
    "bench": [
        *["sizes", "operations", "measure", "machine", "subjects", "full_attention"],
        *["alternatives", "peak", "runner", "plots"],
    ],
    "cli": [
        *["console", "tasks", "prepare", "train", "evaluate", "read", "generate", "inspect"],
        *["memory", "export", "bench", "recall", "reproduce", "report", "completion"],
    ],
}
"""The same inside each folder. A file that is not listed may stand anywhere, but in no circle."""
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULE_PAGES = ("paper.md", "architecture.md")
"""Here `model.x` is a name in a module; elsewhere it may be an attribute of a variable."""
MODULES = sorted(PACKAGE.rglob("*.py"))
TESTS = {path.name: path for path in sorted((ROOT / "tests").rglob("*.py"))}


def imports(path: Path) -> Iterator[str]:
    """Every module of ours that a file imports, in any form and anywhere in the file; what only a
    type checker reads does not count."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
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
    others = {"__init__", "__main__", "__pycache__", "py", "shipped"}  # the last holds a model
    assert rooms - others <= set(ORDER)
    for path in MODULES:
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if own in ("__init__", "__main__"):
            continue
        for module in imports(path):
            if module.split(".")[0] == "melodi" and room(module) != "__version__":
                assert room(module) in ORDER, f"{path} imports {module}"
                assert ORDER.index(room(module)) <= ORDER.index(own), f"{path} imports {module}"


@pytest.mark.parametrize("folder", sorted(p.parent.name for p in PACKAGE.glob("*/__init__.py")))
def test_siblings_import_only_from_above(folder: str) -> None:
    """Inside a folder, too, a file imports only from files before it."""
    files = {path.stem: path for path in (PACKAGE / folder).glob("*.py")}
    files.pop("__init__")
    order = SIBLINGS[folder]
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        found = {module.split(".")[2] for module in imports(path) if f"melodi.{folder}." in module}
        graph[name] = found & files.keys()
        for other in graph[name] if name in order else ():
            if other in order:
                assert order.index(other) < order.index(name), f"{path} imports {other}"
    assert set(TopologicalSorter(graph).static_order()) == files.keys()


def test_the_architecture_page_has_the_same_order() -> None:
    """docs/architecture.md lists the names in the order that the imports have."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    (listed,) = re.findall(r"```text\n(.*?)```", page, re.S)
    assert [line.split()[0] for line in listed.splitlines()] == ORDER


def test_every_module_says_what_it_is() -> None:
    """Every file of the package, the tests and the examples begins with a docstring."""
    for path in [*MODULES, *TESTS.values(), *(ROOT / "examples").glob("*.py")]:
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


def test_public_names_stay() -> None:
    """What users and other programs rely on: names, presets, fields, commands."""
    public = ["LanguageModel", "MemoryState", "ModelConfig", "StreamReader", "load"]
    assert melodi.__all__ == public
    assert all(callable(getattr(melodi, name)) for name in public)
    for name in ("from_official", "to_official", "state_to_official"):
        assert callable(getattr(melodi.meliad, name))
    families = ["melodi-s128-l64", "melodi-s192-l32", "melodi-s192-l96", "transformer-xl"]
    families += ["block-recurrent", "memorizing", "no-memory"]
    laptop = ["melodi", "transformer-xl", "block-recurrent", "memorizing", "no-memory"]
    assert {f"paper-{name}{suffix}" for name in families for suffix in ("", "-12")} <= set(PRESETS)
    assert {f"laptop-{name}" for name in laptop} <= set(PRESETS)
    fields = "vocab_size width num_heads head_width ffn_width window short_term_tokens "
    fields += "long_term_tokens long_term_windows layers dialect branching copy_short_to_long "
    fields += "recurrent_states memory_slots top_k dropout"
    assert set(fields.split()) <= {field.name for field in dataclasses.fields(melodi.ModelConfig)}
    commands = {"prepare", "train", "eval", "read", "generate", "inspect", "report", "memory"}
    assert commands | {"export", "bench", "recall", "completion", "reproduce"} <= set(COMMANDS)


def test_unknown_names_are_refused() -> None:
    """The package answers for its public names only, and lists them."""
    with pytest.raises(AttributeError, match="no attribute 'LanguageModle'"):
        _ = melodi.LanguageModle
    assert set(melodi.__all__) <= set(dir(melodi))


def test_import_does_nothing() -> None:
    """Importing melodi sets no threads and keeps torch and the heavy coats out."""
    code = (
        "import melodi, melodi.config, sys; "
        "assert not {'torch', 'numpy', 'tyro', 'rich', 'transformers'} & set(sys.modules); "
        "import torch; before = torch.get_num_threads(); melodi.LanguageModel; "
        "assert torch.get_num_threads() == before; "
        "assert not {'tyro', 'rich', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.S)


def test_the_readme_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python example of the README runs as it stands."""
    (example,) = python_blocks(ROOT / "README.md")
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    assert (tmp_path / "memory.safetensors").exists()


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the commands of the README were run, on a tiny model."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("readme")
    (folder / "books").mkdir()
    for i in range(8):
        (folder / "books" / f"{i}.txt").write_text(f"It was the year {i}, and nobody knew. " * 9)
    for name in ("book.txt", "more.txt"):
        (folder / name).write_text("It was the year after, and all knew. " * 9)
    threads = torch.get_num_threads()
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        # The run that was trained stands for the one in the package, which is larger.
        patch.setattr(runs, "SHIPPED", folder / "runs" / "books")
        for title in ("## Train your own", "## Read a book and continue it"):
            for command, *args in readme_commands(title):
                assert command == "melodi"
                main([*args, *(TINY if args[0] == "train" else [])])
    torch.set_num_threads(threads)
    return folder


def readme_commands(title: str) -> list[list[str]]:
    """The commands in the first block of a section."""
    section = (ROOT / "README.md").read_text().partition(title)[2]
    lines = re.findall(r"```\n(.*?)```", section, re.S)[0].splitlines()
    return [shlex.split(line, comments=True) for line in lines]


def test_the_readme_goes_from_use_to_detail() -> None:
    """What it is, two commands, and then what a newcomer wants, in that order."""
    titles = re.findall(r"^## (.*)", (ROOT / "README.md").read_text(), re.M)
    first = ["Read a book and continue it", "Train your own", "In Python", "With Hugging Face"]
    assert titles[:5] == [*first, "Results"]


def test_the_readme_commands_run(walked: Path) -> None:
    """What the README tells a newcomer to type works, in that order."""
    run = walked / "runs" / "books"
    for name in ("model.safetensors", "eval-test.json", "report.png"):
        assert (run / name).is_file()
    assert (walked / "book.memory").is_file()


def test_the_api_page_runs(walked: Path) -> None:
    """The code of docs/api.md runs from top to bottom, beside a run."""
    names: dict[str, object] = {}
    with contextlib.chdir(walked):
        for block in python_blocks(ROOT / "docs" / "api.md"):
            exec(block, names)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_examples_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every example runs without arguments, uses public names only, and prints something."""
    used = {module for module in imports(path) if module.startswith("melodi")}
    public = {f"melodi.{name}" for name in melodi.__all__}
    assert used <= public | {"melodi.config.PRESETS", "melodi.config.sandwich"}
    monkeypatch.setattr(sys, "argv", [str(path)])
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(path), run_name="__main__")
    assert out.getvalue()


def test_the_map_is_the_tree() -> None:
    """The README's map names every module and folder of the package, and nothing else."""
    (block,) = re.findall(r"```\nmelodi/\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    mapped: set[str] = set()
    folder = ""
    for line in block.splitlines():
        depth = len(line) - len(line.lstrip())
        names = re.findall(r"\w+\.py\b|\w+/", line)
        assert names, f"{line!r} names no file"
        if depth == 0:
            assert (ROOT / names[0]).is_dir()
            continue
        if depth == 2:
            folder = names[0] if names[0].endswith("/") else ""
        mapped |= {name if depth == 2 else folder + name for name in names}
    tree = {str(path.relative_to(PACKAGE)) for path in MODULES if not path.stem.startswith("__")}
    tree |= {f"{Path(name).parent}/" for name in tree if "/" in name}
    assert mapped == tree


def code_spans(path: Path) -> list[str]:
    """What stands between backticks, outside of blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", path.read_text(), flags=re.S))


def resolve(name: str) -> None:
    """Imports `melodi.<name>`: a module, then attributes, then what a constructor sets."""
    parts = name.split(".")
    module = PACKAGE
    while parts and ((module / parts[0]).is_dir() or (module / f"{parts[0]}.py").is_file()):
        module = module / parts.pop(0)
    found: object = import_module(".".join(module.relative_to(ROOT).parts))
    for part in parts:
        if isinstance(found, type) and not hasattr(found, part):
            assert f"self.{part} =" in inspect.getsource(found), f"{name} does not exist"
            return
        found = getattr(found, part)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_cite_what_exists(path: Path) -> None:
    """Every file, module, dotted name and test that a document cites is there."""
    text = path.read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert "://" in link or (path.parent / link).exists(), f"{link} is not there"
    names, last_test = 0, ""
    for span in code_spans(path):
        if test := re.fullmatch(r"(?=.*test_)(?:tests/)?(test_\w+\.py)?(?:::(\w+))?", span):
            last_test = test[1] or last_test
            source = TESTS[last_test].read_text()
            assert test[2] is None or f"def {test[2]}(" in source, f"{span} does not exist"
        elif re.fullmatch(r"[\w/-]+\.(py|md)", span):
            places = (ROOT, PACKAGE, ROOT / "docs", ROOT / "tests")
            assert any((place / span).is_file() for place in places), f"{span} does not exist"
        elif path.name in MODULE_PAGES and re.fullmatch(rf"({'|'.join(ORDER)})(\.\w+)+", span):
            names += 1
            resolve(span)
    assert names or path.name not in MODULE_PAGES


def prose(path: Path) -> Iterator[str]:
    """Docstrings and comments of a file of Python; the words of any other."""
    if path.suffix != ".py":
        yield path.read_text()
        return
    with path.open("rb") as file:
        tokens = list(tokenize.tokenize(file.readline))
    yield from (token.string for token in tokens if token.type == tokenize.COMMENT)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)


def test_nothing_outside_the_repository_is_cited() -> None:
    """A reader has every text that the code, the tests and the documents refer to."""
    own = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*.md") if ".venv" not in path.parts]
    for path in [*MODULES, *TESTS.values(), *DOCUMENTS, *(ROOT / "examples").glob("*.py")]:
        for words in prose(path):
            for cited in re.findall(r"(?<![\w*./-])[\w/-]+\.md\b", words):
                assert any(f"/{name}".endswith(f"/{cited}") for name in own), f"{path}: {cited}"
            assert not re.search(r"\b[A-Z]{5,}(\.md)? sections? \d", words), f"{path}: {words}"
