"""Faulty worlds for the tests of doctor, plan and dry run."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from megappo.network.store import free_port
from tests.support.harness import start
from tests.support.places import ROOT, TINY

QUICKSTART = "configs/quickstart.yaml"
DRY = ("train", QUICKSTART, "--dry-run")
BIG = "configs/qwen3_8b_8gpu_math.yaml"


def environment(**changes: str) -> dict[str, str]:
    """Return the environment variables of a process without a launcher."""
    launched = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_")
    unlaunched = {name: value for name, value in os.environ.items() if not name.startswith(launched)}
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    return unlaunched | paths | {"PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"} | changes


def megappo(
    *arguments: str, prefix: tuple[str, ...] = (), before: Callable[[], None] | None = None, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a separate process. `prefix` is put before the command, and `before` runs first in the
    process."""
    if not prefix and before is None and "PYTHONPATH" not in changes:  # only variables differ
        return start("megappo", *arguments, environment=environment(**changes))
    return subprocess.run(
        [*prefix, sys.executable, "-m", "megappo", *arguments], cwd=ROOT, env=environment(**changes),
        capture_output=True, text=True, timeout=240, check=False, preexec_fn=before,
    )  # fmt: skip


def fake_package(folder: Path, name: str, version: str) -> str:
    """Write a package with this name and version and return an import path that contains the package."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text("")
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return f"{folder}:{environment()['PYTHONPATH']}"


def pretrained(folder: Path) -> Path:
    """Write the model of the quickstart with weights."""
    shutil.copytree(TINY, folder)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY)).save_pretrained(folder)
    return folder


def cut_short(model: Path) -> None:
    """Truncate the weights, as after an interrupted download."""
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def lose_a_tensor(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def other_sizes(model: Path) -> None:
    """Change a size in config.json, so the weights no longer fit."""
    content = json.loads((model / "config.json").read_text())
    content["intermediate_size"] *= 2
    (model / "config.json").write_text(json.dumps(content))


def listening() -> socket.socket:
    """Return a socket of another program that listens on a port."""
    taken = socket.socket()
    taken.bind(("", 0))
    taken.listen()
    return taken


@contextmanager
def answering(status: int, answer: dict[str, object]) -> Iterator[int]:
    """Serve the same answer to all requests and yield the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, format: str, *arguments: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def closed_port() -> int:
    """Return a port without a listener."""
    return free_port("127.0.0.1")
