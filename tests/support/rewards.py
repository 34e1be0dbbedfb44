"""Samples for reward functions, and small HTTP servers of rewards."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from megappo.observe.ends import End
from megappo.rewards import scorer
from megappo.types import CHAT_MESSAGES, Prompt, Rollouts
from tests.support.data import ALPHABET, character_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": len(ALPHABET), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA: dict[str, Any] = SIZES | {"num_key_value_heads": 2, "pad_token_id": 0, "initializer_range": 0.5}


@contextmanager
def without_reward_workers() -> Iterator[None]:
    """Build runs without reward workers inside the block. Workers would take a tenth of the time of a step with given
    scores."""
    with patch.object(scorer, "RewardPool"):
        yield


def rollouts(*responses: str) -> Rollouts:
    """Return rollouts of chat prompts with two tokens. The n-th response has n + 1 tokens, and the last response is
    truncated."""
    B = len(responses)
    metadata = {CHAT_MESSAGES: [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1="}]}
    lengths = torch.arange(1, B + 1)
    return Rollouts(
        prompts=tuple(Prompt(i, (0, 0), "1+1=", "2", metadata) for i in range(B)), sample_ids_B=torch.arange(B),
        group_ids_B=torch.arange(B), sequences=tuple(torch.tensor([0, 0] + [1] * (i + 1)) for i in range(B)),
        response_lengths_B=lengths, engine_logprob_BR=torch.zeros(B, B),
        response_mask_BR=torch.arange(B) < lengths[:, None],
        ends=tuple(End.RESPONSE_LIMIT if b == B - 1 else End.COMPLETE for b in range(B)),
        weight_versions_B=torch.zeros(B, dtype=torch.int64), responses=responses, raw_responses=responses,
        special_tokens_B=torch.zeros(B, dtype=torch.int64),
    )  # fmt: skip


class _Server(ThreadingHTTPServer):
    request_queue_size = 512  # pending connections


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Yield the address of a server on a free port."""
    with _Server(("127.0.0.1", 0), handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_address[1]}"
        finally:
            listening.shutdown()
            thread.join()


def save(folder: Path, model: Any, template: str | None = None) -> str:
    """Write the folder of a reward model whose tokenizer has one token per character."""
    model.save_pretrained(folder)
    character_tokenizer(template).save_pretrained(folder)
    return str(folder)


CONFIGURATION = """
from transformers import LlamaConfig
class OwnConfig(LlamaConfig):
    model_type = "own_reward"
"""
MODEL = """
from torch import nn
from transformers import LlamaModel, LlamaPreTrainedModel
from .configuration_own import OwnConfig
class OwnReward(LlamaPreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.model, self.score = LlamaModel(config), nn.Linear(config.hidden_size, 1, bias=False)
        self.post_init()
"""
TOKENIZER = """
from transformers import PreTrainedTokenizerFast
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def with_code(folder: Path, *, tokenizer: bool = True) -> Path:
    """Add custom classes to the folder of a Llama reward model, as in many models of the hub."""
    for name, code in (("configuration", CONFIGURATION), ("modeling", MODEL), ("tokenization", TOKENIZER)):
        (folder / f"{name}_own.py").write_text(code)
    classes = {"AutoConfig": "configuration_own.OwnConfig"}
    classes["AutoModelForSequenceClassification"] = "modeling_own.OwnReward"
    _change(folder / "config.json", model_type="own_reward", architectures=["OwnReward"], auto_map=classes)
    if tokenizer:
        own = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
        _change(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=own)
    return folder


def _change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
