"""What an engine learns of other engines' side channels, once for all its ranks."""

from kvferry.core.directory.directory import Directory, LocalDirectory
from kvferry.core.directory.news import EncodedReply, ProducerNews
from kvferry.core.directory.room_follower import RoomFollower

__all__ = ["Directory", "EncodedReply", "LocalDirectory", "ProducerNews", "RoomFollower"]
