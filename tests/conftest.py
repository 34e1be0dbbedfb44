"""Lets Triton kernels run on a CPU, leaves out what takes minutes, and has tests that wait marked so; see README.md."""

import inspect
import os
import warnings
from collections.abc import Iterator

import pytest

from tests.support import waiting

warnings.filterwarnings("ignore", module="megatron")
# Triton decides at import whether kernels run on a GPU or in its interpreter; tests have the latter.
os.environ.setdefault("TRITON_INTERPRET", "1")
waiting.listen()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only what is quick; see README.md")
    parser.addoption("--all", action="store_true", help="also what is exhaustive; see README.md")
    parser.addoption("--light", action="store_true", help="only what depends on versions; see README.md")
    parser.addoption("--learning", action="store_true", help="also runs that learn for minutes; see README.md")
    parser.addoption("--smollm2", metavar="FOLDER", help="SmolLM2-135M-Instruct, for what --learning has it learn")
    parser.addoption("--strength", type=int, default=2, help="of runs/test_conformance.py: features that meet")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is marked `learning` or `exhaustive` is asked for. What is marked `slow` is not quick, but for those of its
    cases that are marked `quick`; where some cases of a test are marked so, its others are not quick either. `--light`
    chooses what is marked `versions`."""
    unwanted = {
        mark for mark, option in (("learning", "learning"), ("exhaustive", "all")) if not config.getoption(option)
    }
    marked = {function_of(item) for item in items if item.get_closest_marker("quick")}

    def is_wanted(item: pytest.Item) -> bool:
        if any(item.get_closest_marker(mark) for mark in unwanted):
            return False
        if not (config.getoption("quick") or config.getoption("light")):
            return True
        chosen = item.get_closest_marker("quick") or function_of(item) not in marked
        if config.getoption("light"):
            return bool(chosen and item.get_closest_marker("versions"))
        return bool(item.get_closest_marker("quick") or (chosen and not item.get_closest_marker("slow")))

    config.hook.pytest_deselected(items=[item for item in items if not is_wanted(item)])
    items[:] = filter(is_wanted, items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """What fixtures wait for is the test's."""
    waiting.HEARD.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that waits is marked so, as it may be run once more."""
    found = yield
    if waiting.HEARD and not item.get_closest_marker("waits"):
        pytest.fail(f"waits ({', '.join(sorted(set(waiting.HEARD)))}) without the marker: add @pytest.mark.waits")
    return found


@pytest.fixture(scope="module")
def world_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Process groups with one rank in them."""
    import torch.distributed as dist

    meeting = tmp_path_factory.mktemp("world") / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def torchs_factories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of torch that make tensors for CUDA where they are asked to, in tests that play it, as if Megatron were
    not imported."""
    import torch

    from megappo.runtime.megatron_cpu import FACTORIES

    for name in FACTORIES:
        monkeypatch.setattr(torch, name, inspect.unwrap(getattr(torch, name)))


def function_of(item: pytest.Item) -> str:
    """What the cases of a test have in common."""
    return item.nodeid.partition("[")[0]
