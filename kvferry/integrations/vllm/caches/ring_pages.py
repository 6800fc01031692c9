"""How a page that is a ring holds a request's last tokens (``CircularBufferSpec``).

Models that compress several tokens into one entry keep what they need of the tokens that do not
make a whole entry yet. The entry of token t is in slot ``t % capacity`` of the request's only page,
and every tensor-parallel rank stores the same: ``_ring_slot_mapping_kernel`` in
``deepseek_v41/compressor.py``, ``circular_qsa_slot_mapping`` in ``qwen4_exp/common/qsa_cache.py``
and ``Glm5NextTailCache`` in ``glm5next/common/attention.py``. So after equally many tokens, the
same token is in the same slot on every engine whose ring has the same capacity, and a page moves as
a whole. The capacity depends on ``num_speculative_tokens``. In orders in which layers are
outermost, vLLM also multiplies the capacity to make all pages equally large
(``unify_kv_cache_spec_page_size``); these models have backends that do not offer such orders.
"""

from __future__ import annotations

from kvferry.core.layout import Field
from kvferry.integrations.vllm import versions
from kvferry.integrations.vllm.caches.pages import Page


def ring_fields(page: Page) -> tuple[Field, ...]:
    """Return the single field of a layer's rings.

    The field's key contains the backend, the type, the shape and vLLM's release. So engines whose
    rings have another capacity have no field with this key, and the handshake refuses the pair.

    Args:
        page: The layer's pages.
    """
    heads, entries, content = page.shape
    capacity = page.kernels * entries
    head, entry, _ = page.strides
    return (
        page.field(
            f"ring[{page.facts.backend}: {capacity} slots of {page.dtype} {heads}x{content}]"
            f"{versions.opaque_release()}",
            unit=content * page.itemsize,
            inner=((heads, head), (page.kernels, page.kernel_stride), (entries, entry)),
        ),
    )
