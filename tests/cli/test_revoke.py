"""``kvferry revoke``, asked of a side channel."""

from __future__ import annotations

import pytest

from kvferry.core.security import OPEN, Access
from kvferry.core.side_channel.server import HandshakeServer
from tests.cli.command import Command
from tests.cli.test_health import KEY_OPTIONS, KEYED, PROBE
from tests.core.messages import encoded, payload


@pytest.mark.parametrize(("access", "keys"), [(OPEN, []), (KEYED, KEY_OPTIONS)])
def test_the_number_of_tickets_is_printed(
    access: Access, keys: list[str], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROBE", PROBE.secret.hex())
    with HandshakeServer(
        encoded(payload()),
        engine="prefill",
        incarnation=7,
        access=access,
        revoke=lambda conversations: 2 - conversations,
    ) as server:
        asked = ["revoke", f"{server.host}:{server.port}", "--timeout", "60", *keys]
        said = "engine prefill: tickets that end with its next step: 2\n"
        assert command.run(*asked) == (0, said, "")
        said = "engine prefill: tickets of conversations that end with its next step: 1\n"
        assert command.run(*asked, "--conversations") == (0, said, "")


def test_a_refusal_is_printed(command: Command) -> None:
    with HandshakeServer(encoded(payload()), engine="prefill", incarnation=7) as server:
        refused = command.run("revoke", f"{server.host}:{server.port}", "--timeout", "60")
    assert (refused.status, "does not end its holds by request" in refused.err) == (1, True)
