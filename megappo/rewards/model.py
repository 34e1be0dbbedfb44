"""A frozen reward model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

_BATCH_SEQUENCES = 16


class RewardModel:
    """`AutoModelForSequenceClassification` with one label, over prompt and response as text.

    The text is tokenised by the reward model's own tokenizer. Raises ValueError for a model with several labels.
    """

    def __init__(self, path: str, *, dtype: torch.dtype, device: torch.device) -> None:
        labels = AutoConfig.from_pretrained(path).num_labels
        if labels != 1:
            raise ValueError(f"reward.model_path '{path}' has {labels} labels, must have 1; use a scalar reward model")
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._model = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype, use_safetensors=True)
        self._model.to(device).eval().requires_grad_(False)
        if self._model.config.pad_token_id is None:
            self._model.config.pad_token_id = self._tokenizer.pad_token_id
        self._device = device

    @torch.inference_mode()
    def score(self, prompts: Sequence[str], responses: Sequence[str]) -> Tensor:
        """(B,) float32 on the CPU; a sample's score does not depend on its neighbours."""
        ids = [
            self._tokenizer(p + r, add_special_tokens=True).input_ids for p, r in zip(prompts, responses, strict=True)
        ]
        scores_B = torch.empty(len(ids))
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        for start in range(0, len(order), _BATCH_SEQUENCES):
            chosen = order[start : start + _BATCH_SEQUENCES]
            scores_B[chosen] = self._score_batch([ids[i] for i in chosen])
        return scores_B

    def _score_batch(self, ids: list[list[int]]) -> Tensor:
        """Right padding: a causal trunk never sees it, and the score is read at the last token of the text.

        The head is applied here because transformers finds the last token by looking for the padding token, which
        may also be the end of the text.
        """
        longest = max(map(len, ids))
        tokens = torch.zeros(len(ids), longest, dtype=torch.int64)
        attention = torch.zeros_like(tokens)
        for row, sequence in enumerate(ids):
            tokens[row, : len(sequence)] = torch.tensor(sequence)
            attention[row, : len(sequence)] = 1
        trunk = self._model.base_model
        hidden = trunk(input_ids=tokens.to(self._device), attention_mask=attention.to(self._device)).last_hidden_state
        last = torch.tensor([len(s) - 1 for s in ids], device=self._device)
        return self._model.score(hidden[torch.arange(len(ids)), last]).float().squeeze(-1).cpu()
