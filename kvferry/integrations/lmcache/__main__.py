from lmcache.cli.main import main

import kvferry.integrations.lmcache

main()
