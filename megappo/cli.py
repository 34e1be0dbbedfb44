"""The command line: runs a subcommand of `megappo.commands` and reports its errors.

Every rank first checks settings, models and layout. A problem that a user can fix is one line on stderr, with exit code
2. Rank 0 prints the problem at once, and launchers then end all ranks. The other ranks wait, and print the problem only
if they are still alive, because a file may be missing on a single node.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence

from megappo import __version__
from megappo.commands import COMMANDS, module_of
from megappo.errors import RUN_ERROR, USER_ERROR, Verdict, nearest_word, verdict_of

_ALIKE = 0.8
"""Smallest similarity (difflib's ratio) of an option that counts as misspelt."""
RANK_0_SPEAKS_WITHIN = 15.0  # seconds: the largest difference between the start times of two ranks


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code: 0, or a code of `megappo.errors`."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        if COMMANDS[arguments.command].on_ranks:
            from megappo.runtime.launchers import adopt_launcher  # imports all settings, which `--help` does not need

            adopt_launcher(os.environ)
        code = RUN_ERROR if module_of(arguments.command).run(arguments) is False else 0
        if arguments.command != "train":  # the output of other commands is their result, so a full disk is an error
            sys.stdout.flush()
        return code
    except (Exception, KeyboardInterrupt) as error:
        verdict = verdict_of(error)
        if verdict.is_unforeseen:  # the traceback is shown
            raise
        _report(verdict)
        return verdict.code


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the command and its arguments, including `overrides`. Unknown arguments end the process with exit code
    2."""
    parser = argparse.ArgumentParser(prog="megappo", description="PPO for large language models.")
    parser.add_argument("--version", action="version", version=f"megappo {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar=f"{{{','.join(COMMANDS)}}}")
    parsers = {name: commands.add_parser(name, help=command.help) for name, command in COMMANDS.items()}
    chosen = argv[0] if argv and argv[0] in COMMANDS else None
    if chosen is not None:
        module_of(chosen).add_arguments(parsers[chosen])
    if argv and argv[0].endswith((".yaml", ".yml")):
        parser.error(f"{argv[0]} is a configuration, and a command must come first; write: megappo train {argv[0]}")
    # argparse assigns positional arguments before later options, so overrides after `--weights DIR` are in `extra`.
    arguments, extra = parser.parse_known_args(argv)
    command = COMMANDS[arguments.command]
    strange = [word for word in extra if word.startswith("-") or not command.takes_overrides]
    if strange:
        chosen_parser = parsers[arguments.command]
        remedy = _remedy(strange[0], chosen_parser.format_usage(), takes_overrides=command.takes_overrides)
        chosen_parser.error(f"unrecognized arguments: {' '.join(strange)}{remedy}")
    if extra:
        arguments.overrides = [*arguments.overrides, *extra]
    return arguments


def _remedy(word: str, usage: str, *, takes_overrides: bool) -> str:
    """Return the remedy for an unknown option: a similar option of the command, or the setting with its name."""
    name, _, value = word.lstrip("-").partition("=")
    near = nearest_word(f"--{name}", re.findall(r"--[\w-]+", usage), cutoff=_ALIKE)
    if near is not None:
        return f"; did you mean {near}?"
    if not takes_overrides or not word.startswith("--"):
        return ""
    from megappo.config.fields import find_field  # imports all settings, which other command lines do not need
    from megappo.config.reading.other_names import counterpart

    section, _, last = name.replace("-", "_").rpartition(".")
    other = counterpart(tuple(section.split(".")), last)
    own = tuple(filter(None, (*section.split("."), last)))
    keys = other.keys if other is not None else (".".join(own),) if find_field(own) is not None else ()
    written = " ".join(f"{key}={value or 'VALUE'}" for key in keys)
    return f"; settings are written without dashes{f': {written}' if written else ', such as run.steps=10'}"


def _report(verdict: Verdict) -> None:
    from megappo.runtime.launchers import is_main, write_torchrun_error
    from megappo.runtime.waiting import pause

    waits = not is_main(os.environ) and verdict.code == USER_ERROR
    place = f" on rank {os.environ['RANK']}" if waits else ""
    sentences = [f"megappo: error{place}: {problem}" for problem in verdict.sentences]
    if waits:  # meanwhile the launcher ends this process with the error of rank 0
        pause(RANK_0_SPEAKS_WITHIN)
    if sentences and not write_torchrun_error(os.environ, sentences, verdict.code):
        print("\n".join(sentences), file=sys.stderr)
