"""LMCache."""

from lmcache.v1.distributed.transfer_channel.factory import register_transfer_channel_factory

from kvferry.integrations.lmcache.channel import create_context

register_transfer_channel_factory("kvferry", create_context)
