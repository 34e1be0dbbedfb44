"""Attacks by a model: responses for scorers and programs for tools, and an engine that generates them."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from megappo.config import Config
from megappo.engines.base import BatchEngine
from megappo.engines.protocol import Completion, GenerateRequest, SamplingParams, SyncReport
from megappo.runtime.watch.interrupts import Stop

SECRET = "a-s3cret-of-a-neighbour"
FORMS = ("{}", "${}$", "\\boxed{{{}}}", "<answer>{}</answer>", "#### {}")
"""Formats in which scorers search the answer."""


def hostile(touched: Path) -> list[str]:
    """Return imports, chains of attributes, powers, nesting, loops and similar attacks."""
    touch = f"__import__('pathlib').Path('{touched}').touch()"
    return [
        touch, f"[{touch}]", f"[[{touch}]]", f"({touch} or 1)", f"f'{{{touch}}}'", f"1 if {touch} else 2",
        f"(lambda: {touch})()", f"[{touch} for x in [1]]", f"exec(\"{touch}\")", f"S(\"{touch}\")",
        f"sympify(\"{touch}\")", f"Integer(\"{touch}\")", f"{{'x': {touch}}}", f"open('{touched}', 'w')",
        f"${touch}$", f"\\boxed{{{touch}}}", f"\\sqrt{{S({touch})}}",
        "().__class__.__base__.__subclasses__()", "x.__class__.__mro__[1].__subclasses__()", "print.__self__",
        "9**9**9**9", "$9^{9^{9^9}}$", "E**10**9", "2**-10**9", "1e999999999", "9!!!!!", "factorial(10**9)",
        "binomial(10**9, 10**8)", "exp(exp(exp(exp(10))))", "[9]*10**10", "'x'*10**10", "10**10*'x'", "1<<10**10",
        "(" * 5000 + "1" + ")" * 5000, "[" * 5000 + "]" * 5000, "-" * 5000 + "1", "+".join("1" * 9000), "{" * 3000,
        "sin(" * 900 + "x" + ")" * 900, "1" * 5000, "\\frac{" * 500, "((x+1)**999)**999", "x!" * 900,
        "[i for i in iter(int, 1)]", "(lambda f: f(f))(lambda f: f(f))", "sum(range(10**12))", "R999999999 U",
    ]  # fmt: skip


class HostileTargets:
    """Resources outside the folder of a program: a file, a folder, a process with a secret, and a port."""

    def __init__(self, root: Path) -> None:
        self.file, self.folder = root / "file", root / "folder"
        self.file.write_text(SECRET)
        self.file.chmod(0o600)
        self.folder.mkdir()
        self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"KEY": SECRET})
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.setblocking(False)
        self.before = self._state()

    def _state(self) -> object:
        status = self.file.stat()
        of_file = (status.st_mode, status.st_mtime_ns, status.st_size, status.st_nlink, os.listdir(self.folder))
        return of_file, os.sched_getaffinity(self.process.pid), os.getpriority(os.PRIO_PROCESS, self.process.pid)

    def is_untouched(self) -> bool:
        """Return whether all resources are unchanged and the port has no connection."""
        try:
            self.server.accept()
        except BlockingIOError:
            return self.process.poll() is None and self._state() == self.before
        return False

    def attacks(self) -> list[str]:
        """Return programs that attack these resources."""
        file, folder, pid = str(self.file), str(self.folder), self.process.pid
        port = self.server.getsockname()[1]
        plain = [
            f"print(open({file!r}).read())", f"open({file!r}, 'a').write('x')", f"open({folder + '/x'!r}, 'w')",
            f"os.truncate({file!r}, 0)", f"os.chmod({file!r}, 0o777)", f"os.unlink({file!r})",
            f"os.chown({file!r}, 1, 1)", f"os.rename({file!r}, 'mine')", f"os.replace('own', {file!r})",
            f"os.link({file!r}, 'mine')",
            f"os.link('own', {folder + '/x'!r})", f"os.symlink('own', {folder + '/x'!r})",
            f"os.mkdir({folder + '/x'!r})", f"os.mkfifo({folder + '/x'!r})", f"os.rmdir({folder!r})",
            f"os.utime({file!r}, (1, 1))",
            f"os.setxattr({file!r}, 'user.x', b'1')", f"os.symlink({file!r}, 'mine'); print(open('mine').read())",
            f"shutil.rmtree({folder!r})", f"shutil.copy({file!r}, 'mine'); print(open('mine').read())",
            f"print(os.listdir({str(self.file.parent)!r}))", f"os.chdir({folder!r}); open('x', 'w')",
            f"print(open('/proc/{pid}/environ').read())", f"print(open('/proc/{pid}/cmdline').read())",
            f"print(open('/proc/{pid}/root{file}').read())", f"print(os.readlink('/proc/{pid}/fd/0'))",
            f"open('/proc/{pid}/oom_score_adj', 'w').write('1000')", f"open('/proc/{pid}/mem', 'rb+')",
            f"os.kill({pid}, 9)", f"signal.pidfd_send_signal(os.pidfd_open({pid}), 9)", "os.kill(os.getppid(), 9)",
            f"os.sched_setaffinity({pid}, [0])",
            f"resource.prlimit({pid}, resource.RLIMIT_CPU, (0, 0))", f"os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
            f"libc.ptrace(16, {pid}, 0, 0)", f"libc.process_vm_readv({pid}, 0, 0, 0, 0, 0)", 
            "libc.shmget(1, 4096, 0o1666)", "print(os.listdir('/'))", "print(os.listdir('/proc'))",
            f"socket.create_connection(('127.0.0.1', {port}))", f"urllib.request.urlopen('http://127.0.0.1:{port}')",
            f"subprocess.run(['sh', '-c', 'cat {file}; echo x > {folder}/x; kill -9 {pid}'])",
            f"print(subprocess.run(['sh', '-c', 'cat {file}; echo x > {folder}/x'], capture_output=True).stdout)",
            "socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'x', '/dev/log')", "socket.create_server(('', 0))",
            "open('/dev/shm/megappo-of-a-test', 'w')", f"open({tempfile.gettempdir() + '/megappo-of-a-test'!r}, 'w')",
            "print(open('/etc/shadow').read())", "open(os.path.dirname(json.__file__) + '/megappo_of_a_test.py', 'w')",
            "os.mkfifo('mine'); os.chmod('mine', 0o777); os.rename('mine', '../mine')",
            f"os.setuid(65534); open({file!r})", "libc.unshare(0x10000000); libc.mount(b'none', b'/', b'tmpfs', 0, 0)",
        ]  # fmt: skip
        head = "import ctypes, json, os, resource, shutil, signal, socket, subprocess, urllib.request"
        return [f"{head}\nlibc = ctypes.CDLL(None)\nopen('own', 'w').close()\n{code}" for code in plain]


class HostileEngine(BatchEngine):
    """Returns the texts of a file in order, for any request. If the prompt contains the output of a tool,
    the answer is 24."""

    def __init__(self, *, config: Config, folder: Path, texts: str, stop: Stop, **_others: Any) -> None:
        super().__init__(stop)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(config.model.tokenizer))
        self._answers, self._texts = 0, json.loads(Path(texts).read_text())

    def update_weights(self, named_tensors: Any, version: int) -> SyncReport:
        for _ in named_tensors:
            pass
        self.version = version
        return SyncReport(())

    def generate(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> Iterator[tuple[int, Completion]]:
        return enumerate([self._answer(request, params) for request in requests])

    def _answer(self, request: GenerateRequest, params: SamplingParams) -> Completion:
        text = "24"
        if "tool" not in self._tokenizer.decode(request.token_ids):
            text = self._texts[self._answers % len(self._texts)]
            self._answers += 1
        ids = [*self._tokenizer(text, add_special_tokens=False)["input_ids"], *params.stop_token_ids[:1]]
        token_ids = tuple(ids[: request.most_tokens(params)])
        logprob = -math.log(len(self._tokenizer))
        return Completion(token_ids, (logprob,) * len(token_ids), len(token_ids) < len(ids), self.version)
