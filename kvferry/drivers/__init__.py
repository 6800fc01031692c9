"""The transports that come with kvferry.

Of kvferry they import only ``kvferry.core`` and ``ucx_format``, which checks, for ``ucx`` and
``nixl``, what UCX has packed.
"""
