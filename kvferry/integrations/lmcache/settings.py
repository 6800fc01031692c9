"""The settings of the transfer channel."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from kvferry import ExchangeOptions

VARIABLE = "KVFERRY_LMCACHE"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    driver: str = "loopback"
    driver_options: dict[str, Any] = {}

    @classmethod
    def configured(cls) -> "Settings":
        return msgspec.json.decode(os.environ.get(VARIABLE, "{}"), type=cls)

    def options(self) -> ExchangeOptions:
        return ExchangeOptions()
