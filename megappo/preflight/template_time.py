"""Time for chat templates. All ranks use the same time, and a resumed run keeps it."""

from __future__ import annotations

from megappo.checkpoint.files import Marker, checkpoints_directory, finished
from megappo.config import Config
from megappo.models.tokens import template_now
from megappo.runtime.ranks.objects import broadcast_object


def with_template_time(config: Config) -> Config:
    """Set `data.template_time` in a single process before the ranks start: the time of the resumed run, or now."""
    markers = finished(checkpoints_directory(config.run.path)).values()
    newest = max(markers, key=lambda marker: marker.step, default=None)
    return _at(config, config.data.template_time or (newest and recorded_time(newest)) or template_now())


def at_one_time(config: Config, recorded: str | None = None) -> Config:
    """Set the same `data.template_time` on all ranks: the configured time, the recorded time, or the main rank's clock.

    This is a collective of the world.
    """
    return _at(config, broadcast_object(config.data.template_time or recorded or template_now()))


def recorded_time(marker: Marker) -> str | None:
    """Return the time in the settings of a checkpoint, or None."""
    time = (marker.content["settings"].get("data") or {}).get("template_time")
    return time if isinstance(time, str) else None


def _at(config: Config, time: str) -> Config:
    return config.model_copy(update={"data": config.data.model_copy(update={"template_time": time})})
