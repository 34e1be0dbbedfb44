"""Secrets in settings are refused before anything shows them, and texts that are shown hide those that it knows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megappo.checkpoint.changes import Changes, compare_settings
from megappo.config import ConfigError, load_config
from megappo.engines.sglang.client import Endpoint
from megappo.errors import one_line, remember, show
from megappo.observe.json_values import JSONValue
from megappo.rewards.http import secret_headers
from megappo.runtime.keys import key_of
from tests.support.places import BASE

TOKEN = "t0p-s3cret-t0ken"
FILED = "another-s3cret-in-a-file"
SERVER = "megappo.rewards.http:scores"
SECRETS: dict[str, Any] = {
    "reward.options.headers.Authorization": "Bearer abcdefgh",
    "reward.options.headers.X-Api-Key": "ABCDEFGH",
    "reward.options.api_key": TOKEN,
    "reward.options.password": "hunter2",
    "reward.options.url": "https://me:pass@judge.example/score",
    "reward.options.endpoint": f"https://judge.example/score?v=1&token={TOKEN}",
    "reward.options.note": "sk-proj-0123456789abcdefghij",
    "reward.options.deep.list": ["fine", "hf_abcdefghijklmnopqrstuvwxyz"],
    "rollout.engine_options.auth-token": TOKEN,
    "rollout.sglang.environment.HF_TOKEN": TOKEN,
    "data.train.options.aws": "AKIAABCDEFGHIJKLMNOP",
    "data.system_prompt": "Send it with Bearer abc123def456 please",
    "rollout.environment.arguments.jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abc",
}
PLAIN: dict[str, Any] = {
    "reward.options.stop_token": "</answer>",
    "reward.options.tokens": "all",
    "reward.options.key": "REWARD_KEY",
    "reward.options.api_key": "JUDGE_API_KEY",
    "reward.options.headers_from_environment": {"X-Api-Key": "REWARD_KEY"},
    "reward.options.headers": {"X-Model": "strict"},
    "reward.options.url": "http://judge:8000/score?version=3",
    "data.system_prompt": "You teach basic arithmetic. A bearer certificates-only rule: see https://a.b/c@d?x=1.",
    "model.path": "/models/task-2024-11-05-disk-sk-learn",
}


@pytest.mark.parametrize("key", SECRETS)
def test_a_secret_in_a_setting_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError) as told:
        load_config(BASE, [f"{key}={json.dumps(SECRETS[key])}"])
    assert len(told.value.problems) == 1
    assert told.value.problems[0].startswith(f"{key} looks like a secret, which a run would write into its files; ")
    given = SECRETS[key]
    words = [given] if isinstance(given, str) else given[1:]
    assert not any(word in str(told.value) for word in words)


@pytest.mark.parametrize("key", PLAIN)
def test_what_is_no_secret_is_taken(key: str) -> None:
    load_config(BASE, [f"{key}={json.dumps(PLAIN[key])}"])


def test_a_key_in_the_place_of_its_variable_is_not_shown() -> None:
    judge = {"url": "http://j/v1", "model": "m", "key": TOKEN, "prompt": "{answer}", "pattern": "(a)"}
    with pytest.raises(ConfigError) as told:
        load_config(BASE, [f"reward={json.dumps({'judge': judge})}"])
    assert TOKEN not in str(told.value) and "give the name of the variable that contains the key" in str(told.value)


def test_a_key_may_stand_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    assert key_of("JUDGE_KEY") == ""
    monkeypatch.setenv("JUDGE_KEY_FILE", str(file))
    for content, words in ((None, "cannot be read"), ("", "a key on one line"), ("one\ntwo\n", "a key on one line")):
        if content is not None:
            file.write_text(content)
            file.chmod(0o600)
        with pytest.raises(ConfigError, match=f"JUDGE_KEY_FILE names {file}, which .*{words}"):
            key_of("JUDGE_KEY")
    file.write_text(f"{FILED}\n")
    assert key_of("JUDGE_KEY") == FILED and FILED not in one_line(f"it said {FILED}")
    assert secret_headers(key="JUDGE_KEY") == {"Authorization": f"Bearer {FILED}"}
    assert secret_headers(headers_from_environment={"X-Key": "JUDGE_KEY"}) == {"X-Key": FILED}
    file.write_text("changed-s3cret")
    assert key_of("JUDGE_KEY") == "changed-s3cret", "it is read when it is needed"
    monkeypatch.setenv("JUDGE_KEY", "variable-s3cret")
    assert key_of("JUDGE_KEY") == "variable-s3cret", "the variable itself comes first"


def test_a_file_with_a_key_is_read_by_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ssh has it: its own file is refused where others may read it, another's (root's, in a container) is not."""
    file, pipe = tmp_path / "key", tmp_path / "pipe"
    file.write_text(FILED)
    os.mkfifo(pipe)
    monkeypatch.setenv("JUDGE_KEY_FILE", str(file))
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    for mode in (0o644, 0o640, 0o620):
        file.chmod(mode)
        with pytest.raises(ConfigError, match=rf"users can read or write \(mode {mode:04o}\); chmod 600 it") as told:
            key_of("JUDGE_KEY")
        assert FILED not in str(told.value)
    for mode in (0o600, 0o400):
        file.chmod(mode)
        assert key_of("JUDGE_KEY") == FILED
    file.chmod(0o444)
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    assert key_of("JUDGE_KEY") == FILED
    for path in (pipe, "/dev/zero", tmp_path):
        monkeypatch.setenv("JUDGE_KEY_FILE", str(path))
        with pytest.raises(ConfigError, match="is not a regular file|cannot be read"):
            key_of("JUDGE_KEY")
    file.write_bytes(FILED.encode() + b"\xff")
    monkeypatch.setenv("JUDGE_KEY_FILE", str(file))
    with pytest.raises(ConfigError, match="cannot be read") as told:
        key_of("JUDGE_KEY")
    assert FILED not in str(told.value)


def test_errors_hide_what_they_are_told() -> None:
    remember(TOKEN)
    for text in (TOKEN, f"{{'score': '{TOKEN}'}}", "Bearer abc123def456", "http://me:pass@host/", "api_key='secret'"):
        for shown in (one_line(text), show(text)):
            assert "(hidden)" in shown and not any(s in shown for s in (TOKEN, "abc123", "me:pass", "secret")), shown
    assert one_line("export REWARD_API_KEY, http://judge:80/score") == "export REWARD_API_KEY, http://judge:80/score"
    assert TOKEN not in repr(Endpoint(0, "http://127.0.0.1:1", TOKEN, 0))


def test_another_token_is_no_other_run() -> None:
    """Nor a token of a version that took them, nor another address; another header is another run."""

    def run(**options: Any) -> dict[str, Any]:
        return {"reward": {"function": SERVER, "options": {"url": "http://s", **options}}}

    old, new = (run(headers={"Authorization": f"Bearer {token}"}) for token in ("old", "new"))
    assert compare_settings(old, new, (1, 1)) == Changes((), ())
    moved = compare_settings(old, run(key="REWARD_KEY"), (1, 1))
    assert moved == Changes(("reward.options.key: not set -> 'REWARD_KEY'",), ())
    named = run(headers_from_environment={"X-Key": "REWARD_KEY"})
    assert not compare_settings(named, run(headers_from_environment={"X-Key": "OTHER"}), (1, 1)).dangerous
    assert compare_settings(named, run(headers={"X-Model": "strict"}), (1, 1)).dangerous
    of_keys: list[dict[str, JSONValue]] = [
        {"reward": {"function": "my:reward", "options": {"key": key}}} for key in ("a", "b")
    ]
    assert compare_settings(of_keys[0], of_keys[1], (1, 1)).dangerous, (
        "of a function of somebody's own it may be anything"
    )
