"""The client of `server.py`. Messages are lines of JSON over the pipes of the process, in both directions."""

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

from safetensors.torch import save_file

from megappo.config.sections.engine import EngineCapabilities
from megappo.engines.base import EngineBase
from megappo.engines.protocol import Completion, GenerateRequest, PauseMode, SamplingParams, SyncReport
from megappo.errors import RunError


class ServedEngine(EngineBase):
    capabilities = EngineCapabilities(concurrent=True, separate_processes=True)

    def __init__(self, *, config: Any, folder: Any, runtime: Any, stop: Any, **_: Any) -> None:
        super().__init__()
        command, pipe = [sys.executable, __file__.replace("client.py", "server.py"), folder], subprocess.PIPE
        self._server: Any = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._stop, self._lock, self._futures = stop, threading.Lock(), dict[int, Future[Completion]]()
        self._weights, self.replicas = config.run.path / f"weights-{runtime.rank}.safetensors", [runtime.rank]
        threading.Thread(target=self._receive, daemon=True).start()

    def submit(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> list[Future[Completion]]:
        shared = {"temperature": params.temperature, "greedy": params.greedy, "stop": params.stop_token_ids}
        return [self._send(ids=r.token_ids, seed=r.seed, most=r.most_tokens(params), **shared) for r in requests]

    def _send(self, **message: Any) -> Future[Completion]:
        future = Future[Completion]()
        with self._lock:
            self._futures[id(future)] = future
            print(json.dumps([id(future), message]), file=self._server.stdin, flush=True)
        return future

    def _receive(self) -> None:
        for number, ids, logprobs, truncated, interrupted in map(json.loads, self._server.stdout):
            answer = Completion(tuple(ids), tuple(logprobs), truncated, self.version, broken_off=interrupted)
            self._futures.pop(number).set_result(answer)

    def poll(self, wait_seconds: float, *, weights_changed: bool = False) -> None:
        wait([*self._futures.values()], wait_seconds)
        if self._server.poll() is not None:
            raise RunError(f"the server ended with {self._server.returncode}; read its messages")
        self._stop.check()  # raises on every rank if the run must stop

    def pause(self, mode: PauseMode) -> None:
        wait([*self._futures.values(), self._send(interrupt=True)])

    def update_weights(self, named_tensors: Any, version: int) -> SyncReport:
        save_file({name: tensor.cpu().contiguous() for name, tensor in named_tensors}, self._weights)
        self._send(load=str(self._weights)).result()
        self.version = version
        return SyncReport.gather([{}])  # or the seconds by phase

    def close(self) -> None:
        self._server.kill()
