"""Describe vLLM's allocated caches as a ``Layout``, by three tables.

- ``cache_kinds.HANDLED``, by class of ``KVCacheSpec``: whether pages hold tokens or states.
- ``attention_pages.PACKINGS``, by attention backend: where K and V are in a page.
- ``state_pages.STATE_PACKINGS``, by backend: the parts of a recurrent layer's state.

``cache_layout.describe`` applies the tables to the tensors that vLLM registers.
"""
