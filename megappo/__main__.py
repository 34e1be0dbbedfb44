"""Entry point of the commands `megappo` and `python -m megappo`."""

from __future__ import annotations

import sys

from megappo.commands import COMMANDS
from megappo.observe.terminal.streams import flush_output, prepare_streams
from megappo.runtime.memory.allocator import collect_as_usual, put_off_collections, with_room_for_frames


def start() -> int:
    """Run the command of `sys.argv`. Returns the exit code. Changes of the import system are permanent."""
    prepare_streams()
    put_off_collections()  # until the ranks are connected or the command ends
    if command := COMMANDS.get(sys.argv[1] if len(sys.argv) > 1 else ""):
        from megappo.runtime.packages import quicken_transformers

        quicken_transformers(builds_models=command.builds_models)
    from megappo.cli import main

    try:
        return with_room_for_frames(main)
    finally:
        collect_as_usual()
        flush_output()


if __name__ == "__main__":
    sys.exit(start())
