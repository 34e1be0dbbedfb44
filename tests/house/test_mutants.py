"""Mutation testing: a change in a copy of the repository is tested with the code of the copy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.places import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.waits]

PROGRAM = """
import sys
from pathlib import Path

sys.path[0] = "tests/house"  # the same path as for the program
import mutants

copy = mutants.copied_repository(Path(sys.argv[1]))
mutants.import_what_tests_import()
starts_processes = "tests/ppo/test_rank_agreement.py::test_error_names_differing_ranks_and_values"
arguments = ["-x", "-q", "-o", "addopts=", "tests/algo/test_golden.py", starts_processes]
with mutants.worker_pool([copy]) as pool:
    print(pool.submit(mutants.run_tests, copy, arguments, 200).result())
    with (copy / "megappo/algo/kl.py").open("a") as file:
        file.write("raise ImportError('changed')")
    print(pool.submit(mutants.run_tests, copy, arguments, 200).result())
"""


def test_code_of_the_copy_is_tested(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "copy")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.stdout.split() == ["passed", "failed"], done.stderr
