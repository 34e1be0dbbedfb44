"""Run Triton kernels on a CPU, select tests by options, and require the mark `waits` for tests that wait; see
README.md."""

import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support import waiting

warnings.filterwarnings("ignore", module="megatron")
# Triton selects the GPU or its interpreter at import. Tests use the interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")
waiting.listen()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="run only quick tests; see README.md")
    parser.addoption("--all", action="store_true", help="also run exhaustive tests; see README.md")
    parser.addoption("--light", action="store_true", help="run only tests that depend on versions; see README.md")
    parser.addoption("--learning", action="store_true", help="also run trainings of several minutes; see README.md")
    parser.addoption("--smollm2", metavar="FOLDER", help="path of SmolLM2-135M-Instruct, which --learning trains")
    parser.addoption("--strength", type=int, default=2, help="number of combined features, for test_conformance.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests with the mark `learning` or `exhaustive` unless an option requests them. `--quick` also
    deselects tests with the mark `slow`, except cases with the mark `quick`. If some cases of a test have the mark
    `quick`, its other cases are deselected as well. `--light` selects tests with the mark `versions`."""
    unwanted = {
        mark for mark, option in (("learning", "learning"), ("exhaustive", "all")) if not config.getoption(option)
    }
    marked = {function_of(item) for item in items if item.get_closest_marker("quick")}

    def is_selected(item: pytest.Item) -> bool:
        if any(item.get_closest_marker(mark) for mark in unwanted):
            return False
        if not (config.getoption("quick") or config.getoption("light")):
            return True
        chosen = item.get_closest_marker("quick") or function_of(item) not in marked
        if config.getoption("light"):
            return bool(chosen and item.get_closest_marker("versions"))
        return bool(item.get_closest_marker("quick") or (chosen and not item.get_closest_marker("slow")))

    config.hook.pytest_deselected(items=[item for item in items if not is_selected(item)])
    items[:] = filter(is_selected, items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Ignore the waits of fixtures."""
    waiting.WAITS.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Require the mark `waits` for a test that waits. Such a test may be repeated."""
    result = yield
    if waiting.WAITS and not item.get_closest_marker("waits"):
        pytest.fail(f"waits ({', '.join(sorted(set(waiting.WAITS)))}) without the marker: add @pytest.mark.waits")
    return result


@pytest.fixture(scope="module")
def world_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Initialise process groups with one rank."""
    import torch.distributed as dist

    meeting = tmp_path_factory.mktemp("world") / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def runtime(world_of_one: None) -> Any:
    """Return the runtime of one process."""
    import torch

    from megappo.runtime.process import Runtime

    return Runtime(0, 1, 0, torch.device("cpu"))


@pytest.fixture
def errors_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command, checks that it fails, and returns the printed errors."""
    from megappo.cli import main

    def errors(*arguments: object, code: int = 2) -> str:
        assert main([*map(str, arguments)]) == code
        return capsys.readouterr().err

    return errors


@pytest.fixture
def output_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command, checks that it succeeds, and returns its output."""
    from megappo.cli import main

    def output(*arguments: object) -> str:
        assert main([*map(str, arguments)]) == 0
        return capsys.readouterr().out

    return output


@pytest.fixture
def torchs_factories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the functions of torch that create tensors, as if Megatron were not imported, for tests that simulate
    CUDA."""
    import torch

    from megappo.megatron.patches.cpu import FACTORIES

    for name in FACTORIES:
        monkeypatch.setattr(torch, name, inspect.unwrap(getattr(torch, name)))


def function_of(item: pytest.Item) -> str:
    """Return the node id of a test without its parameters."""
    return item.nodeid.partition("[")[0]
