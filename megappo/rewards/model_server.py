"""Process with a frozen reward model for all ranks of a run, which serves JSON over HTTP with a key of the run.

    python -m megappo.rewards.model_server --config FILE

`POST /classify {"input_ids": [...]}` returns `{"embedding": [SCORE]}` in SGLang's format, or status 400 with
`{"refused": SENTENCE}` for ids that the model cannot process. A list of lists of ids is a batch, with a list as answer.
The other paths have SGLang's names, so that the same code keeps this server running: `/model_info` answers once the
model can score, `/server_info` returns the labels of the configuration, and `/health_generate` and `/freeze_gc` are
supported.
"""

from __future__ import annotations

import argparse
import gc
import hmac
import json
import os
import socket
import sys
import threading
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megappo.errors import whole_number
from megappo.files.json_values import JSONValue
from megappo.observe.terminal.messages import show_message
from megappo.runtime.memory.allocator import collections_put_off
from megappo.runtime.packages import quicken_transformers

if TYPE_CHECKING:
    from megappo.rewards.model import RewardModel


_LARGEST_BODY_BYTES = 2**31
"""Maximum size of a request. The size is sufficient for thousands of the longest conversations."""


class _ModelServer(ThreadingHTTPServer):
    daemon_threads = True
    # All ranks may connect at the same time; the default backlog of socketserver is 5.
    request_queue_size = 1024

    def __init__(self, arguments: dict[str, Any], model: RewardModel) -> None:
        self.key, self.model = f"Bearer {arguments['api-key']}".encode(), model
        self.labels = json.loads(arguments["extra-metric-labels"])
        self.one_at_a_time = threading.Lock()
        super().__init__((arguments["host"], arguments["port"]), _ModelHandler)

    def handle_error(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: tuple[str, int]
    ) -> None:
        """End the process on an error of the model.

        The thread that keeps the server running then starts a new process. If the new process does not help, the run
        fails with the end of this log. The method ignores OSError, because the client may be gone.
        """
        if isinstance(sys.exception(), OSError):
            return
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


class _ModelHandler(BaseHTTPRequestHandler):
    server: _ModelServer

    def do_GET(self) -> None:
        if not hmac.compare_digest((self.headers.get("Authorization") or "").encode(), self.server.key):
            self.close_connection = True  # the rest of the request is not read
            return self._reply(401, {"refused": "the key is wrong"})
        length = whole_number(self.headers.get("Content-Length") or "0")
        if length is None or length > _LARGEST_BODY_BYTES:
            self.close_connection = True
            return self._reply(400, {"refused": f"Content-Length must be at most {_LARGEST_BODY_BYTES} bytes"})
        body = self.rfile.read(length)
        if self.path == "/classify":
            return self._classify(**json.loads(body))
        if self.path == "/freeze_gc":
            gc.freeze()
        elif self.path not in ("/model_info", "/server_info", "/health_generate"):
            return self._reply(404, {"refused": f"the path {self.path} does not exist"})
        return self._reply(200, {"extra_metric_labels": self.server.labels})

    do_POST = do_GET

    def _classify(self, input_ids: list[Any]) -> None:
        is_batch = bool(input_ids) and isinstance(input_ids[0], list)
        try:
            with self.server.one_at_a_time:
                scores = self.server.model.score_ids(input_ids if is_batch else [input_ids]).tolist()
        except ValueError as error:
            return self._reply(400, {"refused": str(error)})
        answers = [{"embedding": [score]} for score in scores]
        return self._reply(200, answers if is_batch else answers[0])

    def _reply(self, status: int, content: JSONValue) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: str | int) -> None:
        """Ignore the log message of a request. The log is for errors."""


def _load(arguments: dict[str, Any]) -> RewardModel:
    quicken_transformers()
    import torch

    from megappo.rewards.model import RewardModel

    return RewardModel(
        arguments["model-path"],
        dtype=getattr(torch, arguments["dtype"]),
        device=torch.device(arguments["device"]),
        batch_tokens=arguments["batch-tokens"],
        trust_remote_code=arguments.get("trust-remote-code", False),
    )


def main() -> int:
    """Load the model and answer requests until the process ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    arguments = json.loads(parser.parse_args().config.read_text())
    try:
        with collections_put_off():
            model = _load(arguments)
    except ValueError as error:
        show_message(str(error))
        return 1
    _ModelServer(arguments, model).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
