"""Tests of the confinement of programs that a model writes."""

from __future__ import annotations

import ast
import asyncio
import ctypes
import errno
import os
import platform
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megappo.config.sections.environment import SandboxSettings, ToolSettings
from megappo.environments.tool_calling import ToolCalling
from megappo.environments.tools import system_calls
from megappo.environments.tools.confinement import confine, landlock_abi, why_not
from megappo.environments.tools.tool_pool import ToolPool
from megappo.environments.turns import ToolResult
from tests.support.hostile import SECRET, HostileTargets
from tests.support.quick import cases

pytestmark = pytest.mark.waits

PYTHON = {"python": "megappo.environments.tools.mathematics:python"}
PROGRAMS = {"python": "code"}
ABIS = range(3, landlock_abi() + 1)
needs_landlock = pytest.mark.skipif(bool(why_not()), reason=f"this machine cannot confine programs: {why_not()}")


@pytest.fixture
def targets(tmp_path: Path) -> Iterator[HostileTargets]:
    created = HostileTargets(tmp_path)
    yield created
    created.process.kill()
    created.process.wait()
    created.server.close()


def run(code: list[str], settings: ToolSettings) -> list[ToolResult]:
    async def call_all() -> list[ToolResult]:
        return list(await asyncio.gather(*(pool.call("python", {"code": program}) for program in code)))

    pool = ToolPool(PYTHON, settings, PROGRAMS)
    with asyncio.Runner() as loop:
        results = loop.run(call_all())
        pool.close()
    return results


@needs_landlock
def test_confined_programs_reach_nothing_outside_their_folder(targets: HostileTargets) -> None:
    """A confined program reaches no foreign files, processes, network or shared memory. With confined=false it does."""
    attacks = targets.attacks()
    results = run(attacks, ToolSettings(workers=2))
    assert len(attacks) > 50 and targets.is_untouched()
    for code, result in zip(attacks, results, strict=True):
        assert SECRET not in result.text and "root:" not in result.text, (code, result)
    leftovers = (f"{folder}/megappo-of-a-test" for folder in ("/dev/shm", tempfile.gettempdir()))
    assert not any(os.path.exists(path) for path in leftovers)
    free = run(attacks[:2], ToolSettings(workers=1, confined=False))
    assert free[0].text == f"{SECRET}\n" and not targets.is_untouched()


ORDINARY = """
import asyncio, concurrent.futures, decimal, os, random, shutil, sqlite3, subprocess, sys, tempfile
with open("a.txt", "w") as file:
    file.write("one")
shutil.copy("a.txt", "b.txt")
os.chmod("b.txt", 0o600)
print(open("b.txt").read(), len(os.listdir(os.path.expanduser("~"))))
with tempfile.TemporaryDirectory() as folder:
    open(os.path.join(folder, "x"), "w").close()
print(subprocess.run([sys.executable, "-c", "import json; print(json.dumps([1]))"], capture_output=True, text=True))
print(subprocess.run("echo two | tr a-z A-Z", shell=True, capture_output=True, text=True).stdout)
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    print(sum(pool.map(abs, range(4))))
asyncio.run(asyncio.sleep(0))
child = subprocess.Popen(["sleep", "100"])
child.kill()
print(child.wait(), random.SystemRandom().random() < 1, sqlite3.connect("d.db").execute("select 3").fetchone())
"""


@needs_landlock
def test_ordinary_programs_run_in_their_folder() -> None:
    (result,) = run([ORDINARY], ToolSettings(workers=1))
    assert "Error" not in result.text and not result.failure, result
    assert "one 2\n" in result.text and "TWO" in result.text and "-9 True (3,)" in result.text and "[1]" in result.text


@needs_landlock
@pytest.mark.parametrize("abi", cases(ABIS, quick=ABIS[-1:]))
def test_programs_are_confined_at_every_landlock_version(abi: int, targets: HostileTargets, tmp_path: Path) -> None:
    """Older versions of Landlock do not restrict ports and signals."""
    folder = tmp_path / "own"
    folder.mkdir()
    for code in targets.attacks():
        pid = os.fork()
        if pid == 0:
            os.chdir(folder)
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            os.dup2(1, 2)
            confine(str(folder), most_abi=abi)
            try:
                exec(code, {})
            finally:
                os._exit(0)
        deadline = time.monotonic() + 20
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                pytest.fail(f"the program does not exit: {code}")
            os.sched_yield()
    assert targets.is_untouched()


HEADERS = ("x86_64-linux-gnu/asm/unistd_64.h", "asm-generic/unistd.h")
PRETENDED, REFUSED = system_calls.PRETENDED, system_calls.REFUSED
ON_ITSELF = system_calls.OF_ITSELF | system_calls.SOCKET_PAIR
SIGNALS = system_calls.SIGNAL_ITSELF | system_calls.SIGNAL_OTHERS


@pytest.mark.parametrize("machine", [0, 1], ids=["x86_64", "aarch64"])
def test_system_call_numbers_match_linux(machine: int) -> None:
    """System calls that are missing from the headers are newer and have one number on all machines."""
    header = Path("/usr/include", HEADERS[machine])
    if not header.exists():
        pytest.skip(f"{header} does not exist")
    known = dict(re.findall(r"^#define\s+__NR(?:3264)?_(\w+)\s+(\d+)\s*$", header.read_text(), re.MULTILINE))
    newest = max(map(int, known.values()))
    for name, numbers in (PRETENDED | REFUSED | ON_ITSELF | SIGNALS).items():
        number = numbers[machine]
        if name in known or number is None:
            assert number == (int(known[name]) if name in known else None), name
        else:
            assert numbers[0] == numbers[1] and number > newest, name


@needs_landlock
def test_refused_system_calls_are_not_permitted(tmp_path: Path) -> None:
    """Refused calls fail with EPERM, and pretended calls succeed. The arguments are invalid, so an allowed call would
    fail with another error."""
    machine = ["x86_64", "aarch64"].index(platform.machine())
    refused, pretended = ([pair[machine] for pair in calls.values() if pair[machine]] for calls in (REFUSED, PRETENDED))
    report = tmp_path / "report"
    report.touch()
    pid = os.fork()
    if pid == 0:
        writes = os.open(report, os.O_WRONLY)
        confine(str(tmp_path))
        libc, wrong = ctypes.CDLL(None, use_errno=True), [-1] * 6
        outcomes = {n: (libc.syscall(n, *wrong), ctypes.get_errno()) for n in refused}
        outcomes |= {n: (libc.syscall(n, *wrong), 0) for n in pretended}
        os.write(writes, repr(outcomes).encode())
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    outcomes = ast.literal_eval(report.read_text())
    assert outcomes == dict.fromkeys(refused, (-1, errno.EPERM)) | dict.fromkeys(pretended, (0, 0))


FILLS = "for n in range(1000):\n  with open(str(n), 'wb') as file: file.write(b'x' * 10**6)\n"
HIDES = "import os\nkept = []\nfor n in range(200):\n  kept.append(open('x', 'wb', 0))\n  os.unlink('x')\n"
HIDES += "  kept[-1].write(b'x' * 10**6)\n"
MANY = "import os\nfor n in range(100000):\n  os.mkdir(str(n))\n"
LARGE = "try: open('x', 'wb').write(b'x' * 200 * 10**6)\nexcept OSError: pass\n"


@pytest.mark.slow
def test_file_output_of_programs_is_bounded() -> None:
    """The limit covers one large file, many files, unlinked files and folders."""
    wait = "import time\ntime.sleep(60)"
    settings = ToolSettings(workers=2, timeout_seconds=90.0, memory_gigabytes=1.0)
    results = run([*(code + wait for code in (LARGE, FILLS, HIDES, MANY)), "6 * 7"], settings)
    assert [result.failure for result in results] == ["files", "files", "files", "files", ""]
    assert "wrote more than it may" in results[0].text and results[-1].text == "42\n"
    assert max(result.seconds for result in results) < 60


def test_programs_do_not_run_without_confinement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run unconfined only if the settings allow it. Tools that run no programs of the model stay available."""
    monkeypatch.setattr("megappo.environments.tools.tool_pool.why_not", lambda: "it is old")
    environment = ToolCalling(tools=("python",))
    with pytest.raises(ValueError, match=r"'python' runs programs of the model, .* \(it is old\); set .*confined="):
        ToolPool(environment.tools, ToolSettings(), environment.programs)
    for settings in (ToolSettings(confined=False), ToolSettings(sandbox=SandboxSettings(url="http://127.0.0.1:9"))):
        ToolPool(environment.tools, settings, environment.programs).close()
    calculator = ToolPool(ToolCalling().tools, ToolSettings(workers=1))
    with asyncio.Runner() as loop:
        assert loop.run(calculator.call("calculator", {"expression": "6*7"})).text == "42"
        calculator.close()
