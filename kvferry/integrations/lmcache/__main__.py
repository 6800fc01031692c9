"""``lmcache`` with kvferry's transfer channel: all its commands, among them its benchmark."""

from lmcache.cli.main import main

import kvferry.integrations.lmcache  # noqa: F401 - registers the channel

main()
