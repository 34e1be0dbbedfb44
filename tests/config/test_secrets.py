"""Secrets in settings are refused before any output, and known secrets are hidden in messages."""

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
from megappo.files.json_values import JSONValue
from megappo.network.keys import key_of
from megappo.rewards.http import secret_headers
from tests.support.places import BASE

TOKEN = "t0p-s3cret-t0ken"
FILED = "another-s3cret-in-a-file"
SERVER = "megappo.rewards.http:scores"
SECRETS: dict[str, Any] = {
    "reward.options.headers.Authorization": "Bearer abcdefgh", "reward.options.headers.X-Api-Key": "ABCDEFGH",
    "reward.options.api_key": TOKEN, "reward.options.password": "hunter2",
    "reward.options.url": "https://me:pass@judge.example/score",
    "reward.options.endpoint": f"https://judge.example/score?v=1&token={TOKEN}",
    "reward.options.note": "sk-proj-0123456789abcdefghij",
    "reward.options.deep.list": ["fine", "hf_abcdefghijklmnopqrstuvwxyz"], "rollout.engine_options.auth-token": TOKEN,
    "rollout.servers.environment.HF_TOKEN": TOKEN, "data.train.options.aws": "AKIAABCDEFGHIJKLMNOP",
    "data.system_prompt": "Send it with Bearer abc123def456 please",
    "rollout.environment.arguments.jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abc",
}  # fmt: skip
PLAIN: dict[str, Any] = {
    "reward.options.stop_token": "</answer>", "reward.options.tokens": "all", "reward.options.key": "REWARD_KEY",
    "reward.options.api_key": "JUDGE_API_KEY", "reward.options.headers_from_environment": {"X-Api-Key": "REWARD_KEY"},
    "reward.options.headers": {"X-Model": "strict"}, "reward.options.url": "http://judge:8000/score?version=3",
    "data.system_prompt": "You teach basic arithmetic. A bearer certificates-only rule: see https://a.b/c@d?x=1.",
    "model.path": "/models/task-2024-11-05-disk-sk-learn",
}  # fmt: skip


@pytest.mark.parametrize("key", SECRETS)
def test_a_secret_in_a_setting_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(BASE, [f"{key}={json.dumps(SECRETS[key])}"])
    assert len(error.value.problems) == 1
    assert error.value.problems[0].startswith(f"{key} looks like a secret, which a run would write into its files; ")
    secret = SECRETS[key]
    secret_parts = [secret] if isinstance(secret, str) else secret[1:]
    assert not any(part in str(error.value) for part in secret_parts)


@pytest.mark.parametrize("key", PLAIN)
def test_settings_without_secrets_are_accepted(key: str) -> None:
    load_config(BASE, [f"{key}={json.dumps(PLAIN[key])}"])


def test_key_instead_of_its_variable_is_not_shown() -> None:
    judge = {"url": "http://j/v1", "model": "m", "key": TOKEN, "prompt": "{answer}", "pattern": "(a)"}
    with pytest.raises(ConfigError) as error:
        load_config(BASE, [f"reward={json.dumps({'judge': judge})}"])
    assert TOKEN not in str(error.value) and "give the name of the variable that contains the key" in str(error.value)


def test_key_can_be_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    assert key_of("JUDGE_KEY") == ""
    monkeypatch.setenv("JUDGE_KEY_FILE", str(file))
    for content, message in ((None, "cannot be read"), ("", "a key on one line"), ("one\ntwo\n", "a key on one line")):
        if content is not None:
            file.write_text(content)
            file.chmod(0o600)
        with pytest.raises(ConfigError, match=f"JUDGE_KEY_FILE names {file}, which .*{message}"):
            key_of("JUDGE_KEY")
    file.write_text(f"{FILED}\n")
    assert key_of("JUDGE_KEY") == FILED and FILED not in one_line(f"it said {FILED}")
    assert secret_headers(key="JUDGE_KEY") == {"Authorization": f"Bearer {FILED}"}
    assert secret_headers(headers_from_environment={"X-Key": "JUDGE_KEY"}) == {"X-Key": FILED}
    file.write_text("changed-s3cret")
    assert key_of("JUDGE_KEY") == "changed-s3cret", "the file is read at each use"
    monkeypatch.setenv("JUDGE_KEY", "variable-s3cret")
    assert key_of("JUDGE_KEY") == "variable-s3cret", "the variable takes precedence over the file"


def test_key_file_must_be_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule is the rule of ssh. A file of the user is refused if other users have access. A file of another user,
    such as root in a container, is accepted."""
    file, pipe = tmp_path / "key", tmp_path / "pipe"
    file.write_text(FILED)
    os.mkfifo(pipe)
    monkeypatch.setenv("JUDGE_KEY_FILE", str(file))
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    for mode in (0o644, 0o640, 0o620):
        file.chmod(mode)
        with pytest.raises(ConfigError, match=rf"users can read or write \(mode {mode:04o}\); chmod 600 it") as error:
            key_of("JUDGE_KEY")
        assert FILED not in str(error.value)
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
    with pytest.raises(ConfigError, match="cannot be read") as error:
        key_of("JUDGE_KEY")
    assert FILED not in str(error.value)


def test_errors_hide_known_secrets() -> None:
    remember(TOKEN)
    for text in (TOKEN, f"{{'score': '{TOKEN}'}}", "Bearer abc123def456", "http://me:pass@host/", "api_key='secret'"):
        for shown in (one_line(text), show(text)):
            assert "(hidden)" in shown and not any(s in shown for s in (TOKEN, "abc123", "me:pass", "secret")), shown
    assert one_line("export REWARD_API_KEY, http://judge:80/score") == "export REWARD_API_KEY, http://judge:80/score"
    assert TOKEN not in repr(Endpoint(0, "http://127.0.0.1:1", TOKEN, 0))


def test_changed_token_does_not_change_the_run() -> None:
    """A changed token, a token of an earlier version, and a changed address do not change the run. A changed header
    does."""

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
        "options of a custom function can have any meaning"
    )
