"""The process that runs steps; see runner.py.

Usage: python -m tests.gpu.acceptance.worker DESCRIPTOR, one end of a `multiprocessing.Pipe`.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterator
from importlib import import_module
from multiprocessing.connection import Connection

from megappo.runtime.memory.allocator import put_off_collections
from tests.gpu.acceptance.registry import Place
from tests.gpu.acceptance.table import Row, Skip, failed, skipped


def rows_of(function: str, place: Place) -> Iterator[Row]:
    """Yield the rows of a step. An error is the last row."""
    try:
        module, _, name = function.partition(":")
        yield from getattr(import_module(module), name)(place)
    except Skip as reason:
        yield skipped("the step", str(reason))
    except Exception as error:  # noqa: BLE001 - the table reports any error, and the other steps continue
        traceback.print_exc()
        text = " ".join(str(error).split())[:300]
        yield failed("the step", f"{type(error).__name__}: {text}")


def release() -> None:
    """Release the memory of the last step. Imported objects are excluded from later collections."""
    gc.collect()
    gc.freeze()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    """Run steps until the pipe is closed."""
    connection = Connection(int(sys.argv[1]))
    put_off_collections()
    while True:
        try:
            function, place = connection.recv()
        except EOFError:
            return
        print(f"-- {function}", flush=True)
        for row in rows_of(function, Place(**place)):
            connection.send(vars(row))
        release()
        connection.send(None)


if __name__ == "__main__":
    main()
