"""The process that steps run in; see runner.py.

Usage: python -m tests.gpu.acceptance.worker DESCRIPTOR, one end of a `multiprocessing.Pipe`.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterator
from importlib import import_module
from multiprocessing.connection import Connection

from megappo.runtime.heap import put_off_collections
from tests.gpu.acceptance.registry import Place
from tests.gpu.acceptance.table import Row, Skip, failed, skipped


def rows_of(function: str, place: Place) -> Iterator[Row]:
    """What a step finds; an error is its last row."""
    try:
        module, _, name = function.partition(":")
        yield from getattr(import_module(module), name)(place)
    except Skip as reason:
        yield skipped("the step", str(reason))
    except Exception as error:  # noqa: BLE001 - whatever it is, the other steps go on and the table says it
        traceback.print_exc()
        words = " ".join(str(error).split())[:300]
        yield failed("the step", f"{type(error).__name__}: {words}")


def release() -> None:
    """Give back what the last step held. What it has imported is not looked through again."""
    gc.collect()
    gc.freeze()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    """Run steps until nobody asks any more."""
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
