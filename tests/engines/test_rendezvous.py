"""Tests of the rendezvous of servers on several machines."""

from __future__ import annotations

import pytest

from megappo.config.sections.engine import ServerSettings
from megappo.engines.sglang.client import ServerFailure
from megappo.engines.sglang.servers.rendezvous import MultiNodeRendezvous

pytestmark = pytest.mark.waits


def test_part_receives_only_calls_of_its_start() -> None:
    settings = ServerSettings(nodes=2, tensor_parallel=2)
    first = MultiNodeRendezvous.host("127.0.0.1", 0, settings)
    second = MultiNodeRendezvous.join("127.0.0.1", first.port, 1, settings, 10.0)
    assert not second.is_called(1)
    first.call(1)
    assert second.is_called(1) and not second.is_called(2)


def test_joining_part_creates_no_rendezvous() -> None:
    settings = ServerSettings(nodes=2, tensor_parallel=2)
    port = MultiNodeRendezvous.host("127.0.0.1", 0, settings).port  # the store is garbage collected
    with pytest.raises(ServerFailure, match=f"no store listens at 127.0.0.1:{port}, where parts of a server connect"):
        MultiNodeRendezvous.join("127.0.0.1", port, 1, settings, 0.5)
