"""The transports that come with kvferry.

They import ``kvferry.core`` and nothing else of it, but for ``ucx_format``, which checks for two of
them what UCX packed.
"""
