"""Tab: commands, flags and presets are completed in the shell, from what help says."""

import shutil
import subprocess
from pathlib import Path

import pytest
from test_cli import printed, refused

from melodi.cli import COMMANDS
from melodi.config import PRESETS


def completed(script: Path, *words: str) -> set[str]:
    """What bash offers for the last of the words after `melodi`."""
    code = (
        'source "$1"; shift; COMP_WORDS=(melodi "$@"); COMP_CWORD=$#; _melodi; '
        "printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    line = ["bash", "-c", code, "bash", str(script), *words]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every command, the flags of each, presets after --preset; for other words nothing, so that
    the shell offers files."""
    script = tmp_path / "melodi.bash"
    script.write_text(printed(capsys, "completion bash"))
    assert completed(script, "") == {*COMMANDS, "--help", "--version"}
    assert completed(script, "re") == {name for name in COMMANDS if name.startswith("re")}
    assert {"--memory", "--max-tokens", "--min-p"} <= completed(script, "generate", "--m")
    assert {"--model.window", "--preset", "--resume"} <= completed(script, "train", "--")
    assert "--save" not in completed(script, "train", "--s")
    assert completed(script, "train", "--preset", "") == set(PRESETS)
    assert completed(script, "read", "bo") == set()
    assert completed(script, "read", "book.txt", "--sa") == {"--save"}


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_takes_the_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It is sourced without a complaint, and defines what Tab calls."""
    script = tmp_path / "melodi.zsh"
    script.write_text(printed(capsys, "completion zsh"))
    line = ["zsh", "-fc", f"source {script} && whence -w _melodi"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "_melodi: function\n", "")


def test_other_shells(capsys: pytest.CaptureFixture[str]) -> None:
    """One line; the script for zsh is that for bash, after two lines of its own."""
    assert "tcsh" in refused(capsys, "completion tcsh")
    bash, zsh = (printed(capsys, f"completion {shell}") for shell in ("bash", "zsh"))
    assert zsh.endswith(bash)
    assert zsh.startswith("autoload")
