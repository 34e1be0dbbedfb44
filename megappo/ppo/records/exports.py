"""Exports of the actor in Hugging Face format, during and at the end of a run."""

from __future__ import annotations

import shutil
from itertools import chain
from pathlib import Path

from megappo.checkpoint.exports.card import write_card
from megappo.config import Config
from megappo.models.model_files import model_folder
from megappo.ppo.assembly.components import RunComponents
from megappo.reshard.slices import Receiver
from megappo.reshard.writer import write_policy


def export_actor(parts: RunComponents, out: Path, step: int, trained: Config | None = None) -> None:
    """Write the actor after a step and its model card to a folder. An existing folder is replaced.

    A collective of the world. The folder is renamed to `out` after all files are written. Raises OSError on the main
    rank if a file cannot be written.
    `trained`: settings for the model card if the actor was trained with settings other than the settings of this run.
    """
    config = parts.config
    whole = parts.weights.to([Receiver(0)])
    if not parts.runtime.is_main:
        for _ in whole:
            pass
        return
    unfinished = out.with_name(f"{out.name}.writing")
    shutil.rmtree(unfinished, ignore_errors=True)
    write_policy(
        unfinished,
        parts.actor.arch,
        chain(whole, parts.mtp_layers.exported(parts.weights.dtype)),
        parts.tokenizer,
        started_from=model_folder(config.model.path, weights=False),
        stop_token_ids=parts.stop_token_ids,
    )
    write_card(unfinished, trained or config, config.run.path, role="actor", step=step)
    if out.exists():
        shutil.rmtree(out)
    unfinished.rename(out)
