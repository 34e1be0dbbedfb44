"""Conversion of the sampling parameters of a request to SGLang."""

from __future__ import annotations

from megappo.engines.protocol import GenerateRequest, SamplingParams
from megappo.files.json_values import JSONValue

NEUTRAL: dict[str, JSONValue] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "n": 1,
    "beam_width": None,
    "stop": None,
    "stop_regex": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "ignore_eos": False,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": True,
    "no_stop_trim": False,
    "stream_interval": None,
    "logit_bias": None,
    "custom_params": None,
    "watermark": {"enabled": False},
}
"""Values with which SGLang samples from the whole distribution. The fields are those of SGLang 0.5.23's
`SamplingParams` (srt/sampling/sampling_params.py:140) that a request does not set. Every request sends all fields,
because a server may have other defaults (`--preferred-sampling-params`, `watermark-config`). A server that enforces
watermarks rejects the request."""
_GREEDY_TOP_P = 1e-9
"""The top_p value of greedy sampling. The value keeps only the most likely token, and log-probabilities remain those
of the scaled distribution. SGLang's temperature 0 would change the log-probabilities. At temperature 1 no scaling
occurs, and `top_k: 1` takes the largest logit without sorting."""


def sampling_fields(request: GenerateRequest, params: SamplingParams) -> dict[str, JSONValue]:
    """Return all SGLang sampling parameters of a request. The seed and the position of each token determine the
    sample only with deterministic inference. Otherwise SGLang samples from the generator of the server."""
    fields = NEUTRAL | {
        "temperature": params.temperature,
        "max_new_tokens": request.most_tokens(params),
        "min_new_tokens": request.least_tokens(params),
        "stop_token_ids": list(params.stop_token_ids),
        "sampling_seed": request.seed,
    }
    if params.stop_texts is not None:  # SGLang checks only the usual token count of a text, and may stop late
        fields |= {"stop": list(params.stop_texts.texts), "no_stop_trim": True}
    if params.greedy:
        fields |= {"top_k": 1} if params.temperature == 1.0 else {"top_p": _GREEDY_TOP_P}
    return fields
