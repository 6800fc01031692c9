"""LMCache's transfer channel of type ``kvferry``: one cache server reads KV from another.

Importing this package registers the channel with LMCache. ``lmcache server`` imports it as a plugin
(docs/lmcache.md); ``python -m kvferry.integrations.lmcache`` is ``lmcache`` with the channel.
"""

from lmcache.v1.distributed.transfer_channel.factory import register_transfer_channel_factory

from kvferry.integrations.lmcache.channel import (
    KVFerryClient,
    KVFerryContext,
    KVFerryServer,
)
from kvferry.integrations.lmcache.plugin import KVFerryPlugin
from kvferry.integrations.lmcache.settings import Settings, configure

__all__ = [
    "KVFerryClient",
    "KVFerryContext",
    "KVFerryPlugin",
    "KVFerryServer",
    "Settings",
    "configure",
]

register_transfer_channel_factory("kvferry", KVFerryContext)
