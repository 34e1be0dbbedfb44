"""Upload of an exported model to the Hugging Face hub."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from megappo.errors import ConfigError, reason, show
from megappo.models.hub import PATIENCE_SECONDS, http_package, silence

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def check_hub(name: str) -> None:
    """Check before an export that an upload is possible. Raises ConfigError if the name is invalid, the hub does not
    respond, or no user is logged in."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"push_to_hub is {show(name)}, must be OWNER/NAME, such as my-team/my-model")
    from huggingface_hub import constants, get_token

    later = f"export without --push-to-hub, and upload from a machine with a network: hf upload {name} OUT"
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"push_to_hub {name}: HF_HUB_OFFLINE is set; {later}")
    if (why := silence(constants.ENDPOINT, PATIENCE_SECONDS)) is not None:
        raise ConfigError(f"push_to_hub {name}: {why}; {later}")
    if get_token() is None:
        raise ConfigError(f"push_to_hub {name}: no user is logged in to {constants.ENDPOINT}; run hf auth login")


def upload_model(folder: Path, name: str, *, public: bool) -> str:
    """Upload a folder as a model to the hub. Return a sentence with the address.

    A missing repository is created, private unless `public`. An existing repository keeps its visibility. Raises
    ConfigError if the upload fails; the folder remains.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        hub.create_repo(name, private=not public, exist_ok=True)
        commit = hub.upload_folder(repo_id=name, folder_path=folder, commit_message="Export of megappo")
    except (OSError, ValueError, http_package().HTTPError) as error:
        raise ConfigError(
            f"{folder} is written, but could not be uploaded to {name} ({reason(error)}); to try again, run "
            f"{shlex.join(['hf', 'upload', name, str(folder)])}"
        ) from error
    return f"uploaded to {name}, commit {commit.oid[:12]}"
