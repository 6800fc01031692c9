"""The transports that come with kvferry. They import ``kvferry.core`` and nothing else of it,
but for ``ucx_format``, which those that hand UCX what peers packed have in common."""
