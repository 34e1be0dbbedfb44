"""Makes the packages of the repository importable where nothing is installed, lets Triton kernels run on a CPU, and
leaves out what takes minutes: with `--quick` what is `slow`, without `--learning` what is `learning`."""

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")]
warnings.filterwarnings("ignore", module="megatron")
# Triton decides at import whether kernels run on a GPU or in its interpreter; tests have the latter.
os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only what is quick; see README.md")
    parser.addoption("--learning", action="store_true", help="also runs that learn for minutes; see README.md")
    parser.addoption("--smollm2", metavar="FOLDER", help="SmolLM2-135M-Instruct, for what --learning has it learn")
    parser.addoption("--strength", type=int, default=2, help="of distributed/test_conformance.py: features that meet")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is marked `learning` is asked for. What is marked `slow` is not quick. Where some cases of a test are marked
    `quick`, the others are not; of what needs several processes only what is marked so is."""
    if not config.getoption("learning"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("learning")])
        items[:] = [item for item in items if not item.get_closest_marker("learning")]
    if not config.getoption("quick"):
        return
    marked = {function_of(item) for item in items if item.get_closest_marker("quick")}

    def is_quick(item: pytest.Item) -> bool:
        if item.get_closest_marker("slow"):
            return False
        one_process = item.path.is_relative_to(ROOT / "tests" / "unit")
        return bool(item.get_closest_marker("quick")) or (one_process and function_of(item) not in marked)

    config.hook.pytest_deselected(items=[item for item in items if not is_quick(item)])
    items[:] = filter(is_quick, items)


@pytest.fixture(scope="module")
def world_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Process groups with one rank in them."""
    import torch.distributed as dist

    meeting = tmp_path_factory.mktemp("world") / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def function_of(item: pytest.Item) -> str:
    """What the cases of a test have in common."""
    return item.nodeid.partition("[")[0]
