"""Checks of running judge servers: a server must respond, accept the configured key, and serve the configured model."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator

from megappo.config import Config
from megappo.config.sections.judge import JudgeSettings
from megappo.doctor.findings import Finding, broken, fine, from_sentence
from megappo.errors import either
from megappo.network.http_client import fetch, proxy_of
from megappo.rewards.http import bearer, refusal
from megappo.rewards.judge import judge_client

_ANSWER_SECONDS = 10.0


def judge_findings(config: Config) -> Iterator[Finding]:
    """Yield a finding for each judge with a server that is started separately."""
    for name, judge in config.reward.judges.items():
        if judge.url is not None:
            yield _judge_finding(judge, judge.url, config.reward.key_of(name))


def _judge_finding(judge: JudgeSettings, address: str, key: str) -> Finding:
    try:
        client = judge_client(judge)
    except ValueError as error:
        return from_sentence("judge", "broken", f"{key}: {error}")
    url = f"{client.url}/models"
    try:
        answer = fetch(urllib.request.Request(url, headers=bearer(client.key)), timeout_seconds=_ANSWER_SECONDS)
        names = [str(model["id"]) for model in json.loads(answer)["data"]]
    except urllib.error.HTTPError as error:
        shown = refusal(error)
        if error.code in (401, 403):
            text = f"{address} of {key} rejects the key ({shown})"
            return broken("judge", text, f"set {key}.key to a variable with the right key")
        return broken("judge", f"{url} answers {shown}", f"fix {key}.url")
    except (OSError, http.client.HTTPException) as error:
        proxy = proxy_of(url)
        way = f" through the environment's proxy {proxy}" if proxy else ""
        text = f"{address} of {key} cannot be reached{way} ({getattr(error, 'reason', error)})"
        return broken("judge", text, "start the server, or fix the address")
    except (ValueError, KeyError, TypeError, RecursionError):
        return broken("judge", f"{url} does not answer as an OpenAI server does", f"fix {key}.url, which ends in /v1")
    if judge.model not in names:
        return broken("judge", f"{address} serves {either(names)}, not '{judge.model}'", f"set {key}.model to one")
    return fine("judge", f"{address} serves {judge.model}")
