"""`melodi completion`: commands and flags to a script for the shell, made from their own help."""

import contextlib
import io
import re
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from melodi.cli import COMMANDS, dispatch
from melodi.cli.console import parse
from melodi.config import PRESETS


@dataclass
class CompletionArgs:
    shell: Annotated[
        tyro.conf.Positional[Literal["bash", "zsh"]], tyro.conf.arg(metavar="{bash,zsh}")
    ]
    """Which shell the script is for."""


def completion(args: list[str]) -> None:
    """A script that completes commands, flags and presets; other words stay files.

    Example: melodi completion bash >> ~/.bashrc
    """
    options = parse(CompletionArgs, completion, args)
    flags = {name: flags_of(name) for name in COMMANDS}
    print(SHELLS[options.shell] + script(flags))


def flags_of(command: str) -> list[str]:
    """The flags that the help of a command names."""
    help_text = io.StringIO()
    with contextlib.redirect_stdout(help_text), contextlib.suppress(SystemExit):
        dispatch([command, "--help"])
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", help_text.getvalue())))


def script(flags: dict[str, list[str]]) -> str:
    cases = [f'        {name}) choices="{" ".join(found)}" ;;' for name, found in flags.items()]
    return SCRIPT.format(
        commands=" ".join([*flags, "--help", "--version"]),
        presets=" ".join(PRESETS),
        cases="\n".join(cases),
    )


SHELLS = {
    "bash": "",
    "zsh": "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n",
}
SCRIPT = """\
_melodi() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" choices=""
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    if [ "$COMP_CWORD" -eq 1 ]; then
        choices="{commands}"
    elif [ "$before" = --preset ]; then
        choices="{presets}"
    elif [ "${{word#-}}" = "$word" ]; then
        choices=""
    fi
    COMPREPLY=( $(compgen -W "$choices" -- "$word") )
}}
complete -o default -F _melodi melodi"""
