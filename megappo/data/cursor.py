"""The order in which prompts are taken; the same on every rank without communication."""

from __future__ import annotations

from typing import Any

import torch


class Cursor:
    """Walks through a data set epoch by epoch, each in an order drawn from (seed, epoch)."""

    def __init__(self, dataset_size: int, seed: int, shuffle: bool, *, fingerprint: str) -> None:
        """`fingerprint` identifies the data, so that a saved cursor is not used on other data."""
        self._size, self._seed, self._shuffle, self._fingerprint = dataset_size, seed, shuffle, fingerprint
        self.epoch = 0
        self.position = 0

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._size))
        generator = torch.Generator().manual_seed((self._seed << 20) + self.epoch)
        return torch.randperm(self._size, generator=generator).tolist()

    def take(self, n: int) -> list[int]:
        """The next `n` indices, across ends of epochs."""
        taken: list[int] = []
        while len(taken) < n:
            part = self._order()[self.position : self.position + n - len(taken)]
            taken += part
            self.position += len(part)
            if self.position == self._size:
                self.epoch, self.position = self.epoch + 1, 0
        return taken

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"epoch": self.epoch, "position": self.position, "fingerprint": self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a saved cursor stood. Raises ValueError where the data are others."""
        if state["fingerprint"] != self._fingerprint:
            raise ValueError(
                f"the data's fingerprint is {self._fingerprint[:12]}, the saved cursor's {state['fingerprint'][:12]}; "
                "use the data the run began with, or start a new run"
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
