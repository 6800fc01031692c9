"""The ``kvferry`` command, as a user runs it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

import kvferry
from kvferry import cli
from kvferry.cli import drivers
from kvferry.cli.commands import app
from kvferry.core.transport.registry import DriverInfo, DriverReport, describe, find
from tests.cli.command import Command


def test_summaries_are_whole_at_80_columns(command: Command) -> None:
    shown = command.run("--help", width=80)
    assert "..." not in shown.out.replace("[ARGS]...", "")
    for each in app.registered_commands:
        name = each.name or str(each.callback and each.callback.__name__)
        helped = command.run(name, "--help", width=80).out
        summary = " ".join(helped.split("\n\n")[1].split())
        assert f" {name} {summary}" in shown.words
        assert max(map(len, helped.splitlines())) <= 100


def test_interrupted_command_says_so(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(drivers, "installed", interrupted)
    assert command.run("drivers") == (130, "", "kvferry: interrupted\n")


def test_output_that_nobody_reads_is_a_failure(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush, asked = sys.stdout.flush, list[bool]()

    def broken() -> None:
        asked.append(True)
        if len(asked) == 1:
            raise BrokenPipeError
        flush()

    monkeypatch.setattr(cli, "run", lambda: 0)
    monkeypatch.setattr(sys.stdout, "flush", broken)
    assert command.run().status == 1


def test_version_is_printed(command: Command) -> None:
    assert command.run("--version").out.strip() == kvferry.__version__


REASON = " ".join(f"word{n}" for n in range(30))
NEEDY = DriverInfo(name="needy", distribution="fake", version="1.2", entry_point="fake:Driver")


def test_drivers_are_listed_with_capabilities_or_reason(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, needy = describe(find("loopback")), DriverReport(info=NEEDY, reason=REASON)
    assert own.capabilities is not None
    less = replace(own.capabilities, max_outstanding=3, concurrent_connect=False)
    monkeypatch.setattr(drivers, "describe", lambda report: report)
    found = [replace(own, capabilities=less), needy]
    monkeypatch.setattr(drivers, "installed", lambda: found)
    listed = command.run("drivers", width=80)
    assert listed.status == 0
    for part in (
        *(f"loopback: kvferry {kvferry.__version__}", "memory: cpu; max notification: 65536"),
        *("cancel: yes", "max outstanding: 3; concurrent connect: no"),
        f"needy: fake 1.2 does not work here: {REASON}",
    ):
        assert part in listed.words
    told = [line.rstrip() for line in listed.out.splitlines() if " word" in line]
    assert all(60 < len(line) <= 80 for line in told[:-1])
    loopback, other = json.loads(command.run("drivers", "--json").out)
    assert (loopback["works"], loopback["reason"]) == (True, None)
    assert loopback["capabilities"]["memory"] == ["cpu"]
    assert (loopback["name"], loopback["version"]) == ("loopback", kvferry.__version__)
    assert (other["works"], other["capabilities"], other["reason"]) == (False, None, REASON)
