"""`megappo completion`: a shell script that completes commands, options, and settings as overrides."""

from __future__ import annotations

import argparse
from typing import Any

from megappo.commands import COMMANDS, module_of
from megappo.config.fields import all_keys, dotted, find_field, section_of

SHELLS = ("bash", "zsh")
_BASH = r"""# Completes megappo's commands, options and settings. Written by `megappo completion {shell}`.
{prelude}_megappo_settings="{settings}"
_megappo_commands="{commands}"
_megappo_options() {{
    case $1 in
{options}
    esac
}}
_megappo_values() {{
    case $1 in
{values}
    esac
}}
_megappo() {{
    local line=${{COMP_LINE:0:COMP_POINT}} command=${{COMP_WORDS[1]}} all= overrides= chosen=
    local current=${{line##* }}
    local before=${{line% *}}
    before=${{before##* }}
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        chosen=$(compgen -W "$_megappo_commands" -- "$current")
    elif [ -n "$(_megappo_values "$command $before")" ]; then
        chosen=$(compgen -W "$(_megappo_values "$command $before")" -- "$current")
    elif [[ $current == -* ]]; then
        chosen=$(compgen -W "$(_megappo_options "$command")" -- "$current")
    else
        case $command in
            {takes_overrides}) overrides=$_megappo_settings ;;
            settings) all=${{_megappo_settings//=/}} ;;
        esac
        if [[ -n $overrides && -n $current && $current != *=* ]]; then
            chosen=$(compgen -W "$overrides" -- "$current")
        elif [[ -n $all ]]; then
            chosen=$(compgen -W "$all" -- "$current")
        fi
    fi
    local word
    for word in $(printf '%s' "$chosen"); do
        case $word in
            *=) COMPREPLY+=("$word") ;; # a value follows
            *) COMPREPLY+=("$word ") ;;
        esac
    done
    if ((${{#COMPREPLY[@]}})) && type compopt &>/dev/null; then
        compopt -o nospace 2>/dev/null
    fi
    return 0
}}
complete {files} -F _megappo megappo
"""
_PRELUDES = {"bash": "", "zsh": "autoload -U +X bashcompinit && bashcompinit\n"}
_FILES = {"bash": "-o default", "zsh": "-o default -o nospace"}
"""Options of `complete` that offer files as a fallback. zsh has no `compopt`."""


class _Recorder(argparse.ArgumentParser):
    """Parser that records the arguments of a command."""

    def __init__(self) -> None:
        super().__init__(add_help=False)
        self.declared: list[argparse.Action] = []

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        action = super().add_argument(*names, **options)
        self.declared.append(action)
        return action


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megappo completion`."""
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="shell that reads the script: bash or zsh")


def run(arguments: argparse.Namespace) -> None:
    """Print the script."""
    print(script(arguments.shell), end="")


def script(shell: str) -> str:
    """Return the script for one of SHELLS. It completes without a start of Python."""
    options, values = [], []
    for name in COMMANDS:
        recorder = _Recorder()
        module_of(name).add_arguments(recorder)
        known = [word for action in recorder.declared for word in action.option_strings]
        options.append(f'        {name}) echo "{" ".join([*known, "--help"])}" ;;')
        for action in recorder.declared:
            if action.choices is not None:
                before = "|".join(f'"{name} {word}"' for word in action.option_strings) or f'"{name} {name}"'
                values.append(f'        {before}) echo "{" ".join(map(str, action.choices))}" ;;')
    keys = [key for key in all_keys() if (field := find_field(key)) is not None and section_of(field) is None]
    return _BASH.format(
        shell=shell,
        prelude=_PRELUDES[shell],
        files=_FILES[shell],
        settings=" ".join(f"{dotted(key)}=" for key in keys),
        commands=" ".join(COMMANDS),
        options="\n".join(options),
        values="\n".join(values),
        takes_overrides=" | ".join(name for name, command in COMMANDS.items() if command.takes_overrides),
    )
