"""The transports that come with kvferry. They import ``kvferry.core`` and nothing else of it."""
