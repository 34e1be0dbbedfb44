"""Frozen reward model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PretrainedConfig

from megappo.errors import first_of, reason
from megappo.files.folder_texts import OF_TOKENIZERS, check_texts
from megappo.models.tokens import Message, rendered, template_now, whole_ids
from megappo.plugins import users_code


@contextmanager
def _loading(path: str) -> Iterator[None]:
    """Convert errors of transformers about a folder to ValueError with a single sentence."""
    try:
        check_texts(Path(path), ("config.json", *OF_TOKENIZERS))
        yield
    except Exception as error:  # transformers and the code in the folder can raise any error
        if "contains custom code" in str(error):
            raise ValueError(
                f"reward.model_path '{path}' cannot be loaded without running code in its folder; read that code and "
                "set model.trust_remote_code to true, or use another reward model"
            ) from error
        problem = f"{type(error).__name__}: {reason(error)}"
        raise ValueError(f"reward.model_path '{path}' cannot be loaded ({problem}); check the folder") from error


def batches_of(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield indices in batches of similar lengths. A padded batch has at most `batch_tokens` tokens."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[i] > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def check_folder(path: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Return the configuration of a reward model. Raises ValueError for a missing configuration or several labels."""
    with _loading(path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if config.num_labels != 1:
        raise ValueError(
            f"reward.model_path '{path}' has {config.num_labels} labels, must have 1; use a scalar reward model"
        )
    return config


class RewardTexts:
    """Token ids of prompt and response for a reward model, from the model's tokenizer.

    A text with more tokens than the model has positions loses its beginning.
    """

    def __init__(self, path: str, *, trust_remote_code: bool = False, template_time: str | None = None) -> None:
        """Load configuration and tokenizer. Raises ValueError if either is missing, or if there are several labels.

        `template_time`: see `data.template_time`.
        """
        self._template_time = template_time or template_now()
        config = check_folder(path, trust_remote_code=trust_remote_code)
        with _loading(path):
            self._tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
            self._vocabulary: int = config.get_text_config().vocab_size
        self._longest_tokens: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts can be chat messages."""
        return bool(self._tokenizer.chat_template)

    def ids(self, prompt: str | Sequence[Message], response: str) -> list[int]:
        """Return the token ids of a text and its response, or of chat messages with the response as the assistant's
        message.

        Raises ValueError for input that the model cannot process.
        """
        if isinstance(prompt, str):
            ids = whole_ids(self._tokenizer, prompt + response)
        elif not self.has_chat_template:
            raise ValueError("the reward model's tokenizer has no chat template; use prompts that are text")
        else:
            chat = [*prompt, {"role": "assistant", "content": response}]
            problem = "the reward model's chat template fails on a prompt and its response"
            with users_code(problem, "fix the template or the messages"):
                text = rendered(self._tokenizer, chat, goes_on=False, time=self._template_time)
            ids = self._tokenizer(text, add_special_tokens=False).input_ids
        self.check(ids)
        return list(ids if self._longest_tokens is None else ids[-self._longest_tokens :])

    def check(self, ids: Sequence[int]) -> None:
        """Raise ValueError for token ids that the model cannot process."""
        if not ids:
            raise ValueError("a prompt and its response have no token in the reward model; use another reward model")
        if max(ids) >= self._vocabulary:  # such an id would end the process on a GPU
            raise ValueError(
                f"the reward model's tokenizer makes token {max(ids)}, its vocabulary has {self._vocabulary}; "
                "use the tokenizer of the model's training"
            )


class RewardModel:
    """`AutoModelForSequenceClassification` with one label, for prompts and responses that are text.

    The tokenizer of the reward model tokenises the text. The score is the output at the last token. A text with more
    tokens than the model has positions loses its beginning.
    """

    def __init__(
        self,
        path: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        batch_tokens: int = 16384,
        trust_remote_code: bool = False,
        template_time: str | None = None,
    ) -> None:
        """Load the model.

        Raises ValueError for a folder without a model, several labels, or weights without a score head. `batch_tokens`
        is the maximum size of a batch including padding. A longer text is a separate batch.
        """
        self.texts = RewardTexts(path, trust_remote_code=trust_remote_code, template_time=template_time)
        with _loading(path):
            self._model, loading = AutoModelForSequenceClassification.from_pretrained(
                path, dtype=dtype, use_safetensors=True, trust_remote_code=trust_remote_code, output_loading_info=True
            )
        self._require_head(path, loading["missing_keys"])
        self._model.to(device).eval().requires_grad_(False)
        self._device, self._batch_tokens = device, batch_tokens

    def _require_head(self, path: str, missing: Sequence[str]) -> None:
        if missing:
            raise ValueError(
                f"reward.model_path '{path}' lacks the weights {first_of(sorted(missing), 3)}, which would be "
                "random; use a trained reward model"
            )
        if not hasattr(self._model, "score"):
            raise ValueError(
                f"reward.model_path '{path}' is a {type(self._model).__name__}, which does not score at the last "
                "token; use a decoder's reward model"
            )

    def score(self, prompts: Sequence[str | Sequence[Message]], responses: Sequence[str]) -> Tensor:
        """Return scores (B,), float32 on the CPU. The score of a sample does not depend on the other samples of the
        batch.

        The response is appended to a prompt that is text. The chat template of the reward model renders chat messages
        together with the response as the assistant's message.
        """
        return self.score_ids([self.texts.ids(p, r) for p, r in zip(prompts, responses, strict=True)])

    @torch.inference_mode()
    def score_ids(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """Return scores (B,) of token ids, float32 on the CPU. Raises ValueError for ids that the model cannot use."""
        for sequence in ids:
            self.texts.check(sequence)
        scores_B = torch.empty(len(ids))
        for chosen in batches_of([len(sequence) for sequence in ids], self._batch_tokens):
            scores_B[chosen] = self._score_batch([ids[i] for i in chosen])
        return scores_B

    def _score_batch(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """Return scores of one batch with padding on the right.

        A causal trunk never attends to the padding. The score is the output at the last token of the text. The head is
        applied here because transformers searches for the padding token to locate the last token. The padding token
        can also be the token that ends the text.
        """
        tokens = pad_sequence([torch.tensor(sequence) for sequence in ids], batch_first=True).to(self._device)
        lengths = torch.tensor([len(sequence) for sequence in ids], device=self._device)
        attention = (torch.arange(tokens.shape[1], device=self._device) < lengths[:, None]).long()
        hidden = self._model.base_model(input_ids=tokens, attention_mask=attention).last_hidden_state
        rows = torch.arange(len(ids), device=self._device)
        return self._model.score(hidden[rows, lengths - 1]).float().squeeze(-1).cpu()
