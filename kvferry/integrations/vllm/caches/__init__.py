"""vLLM's allocated caches, described as a ``Layout``; a kind of cache is an entry in a table.

- ``cache_specs.SPECS``, by class of spec: whether a page holds tokens or a state, or is refused.
- ``attention_pages.PACKINGS``, by attention backend: where K and V are in a page.
- ``state_pages.STATE_PACKINGS``, by backend: the parts of a recurrent layer's state.

``cache_layout.describe`` applies them to the tensors that vLLM registers.
"""
