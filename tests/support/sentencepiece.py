"""Tiny tokenizers that insert a space before a text and remove a space in decoding, as those of Llama 2, Mistral and
Mixtral."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

TEXTS = ("you said hello world. Hello! 1 + 2 = 3: the quick brown fox, yes or no\n[INST] hi [/INST]",) * 3
SPECIAL = ("<unk>", "<s>", "</s>")
KINDS = ("prepend", "first", "always", "unigram", "llama")
"""`prepend`: the normalizer of the folders of Llama 2 and Mixtral. `first` and `always`: Metaspace, with a space before
the first piece, or also after special tokens. `unigram`: with a decoder of Metaspace. `llama`: the class of
transformers."""


@cache
def sentencepiece(kind: str) -> PreTrainedTokenizerBase:
    """Return a tokenizer of one of the `KINDS`."""
    if kind == "llama":
        model = json.loads(sentencepiece("prepend").backend_tokenizer.to_str())["model"]
        return LlamaTokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
    if kind == "unigram":
        made = Tokenizer(models.Unigram())
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        made.decoder = decoders.Metaspace(prepend_scheme="first")
        characters = sorted(set("".join(TEXTS)))
        trainer: Any = trainers.UnigramTrainer(
            vocab_size=120, special_tokens=list(SPECIAL), unk_token="<unk>", initial_alphabet=characters,
            show_progress=False,
        )  # fmt: skip
    else:
        made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        if kind == "prepend":
            made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        else:
            made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=[*SPECIAL, *bytes_], show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    read = json.loads(made.to_str())  # the trainer marks bytes as special tokens
    read["added_tokens"] = [token for token in read["added_tokens"] if token["content"] in SPECIAL]
    made = Tokenizer.from_str(json.dumps(read))
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
