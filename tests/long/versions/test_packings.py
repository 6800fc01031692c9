"""The descriptions of pages agree with the backends and specs of every version.

The tests of the descriptions are written for the newest version. On another version exactly those
fail that need what it lacks.
"""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from tests.engines.engines import ENVIRONMENT, ROOT
from tests.long.versions.environments import OTHERS, interpreter

pytestmark = pytest.mark.timeout(600)

SINCE_0_32 = {
    "test_every_kind_of_cache_has_a_verdict",  # the tables are complete for the newest version
    "test_every_backend_has_a_verdict",
    "test_the_page_names_all_caches",
    "test_the_page_has_a_verdict_on_every_architecture",
    "test_opaque_pages_of_unlike_orders_or_releases_do_not_match",  # older releases are named
    "test_every_order_that_vllm_offers[ROCM_SEGMENTED_ATTN-planes-unbound]",
}

SINCE_0_31 = {
    "test_what_is_refused[SlidingWindowMLASpec-options9-None]",  # had no bounded replay
    # Specs had no block_stride_alignment.
    "test_what_is_not_certain_is_opaque[DEEPSEEK_SPARSE_SWA-mla-options16]",
    # Nor dcp_sharded.
    "test_context_parallel_ranks_divide_the_tokens_of_the_groups_that_say_so",
    *(
        f"test_expressions_of_backends_on_cuda[DEEPSEEK_SPARSE_SWA FP8_PER_TENSOR 512 {sizes}]"
        for sizes in ("528 528", "3168 528", "None 528", "512 528", "584 584")
    ),
}

SINCE_0_30 = {
    "test_every_order_that_vllm_offers[TRITON_FLASH_ATTN-full-split_cells]",
    "test_every_order_that_vllm_offers[TRITON_FLASHINFER-full-split_cells]",
    "test_every_order_that_vllm_offers[B12X-planes-unbound]",
    "test_every_order_that_vllm_offers[FLASHINFER_MLA_SPARSE_SM90-mla-one_row]",
    "test_expressions_of_backends[FLASHMLA_SPARSE NVFP4_DS_MLA 352]",
}

LACKING = {
    "0.31.0": SINCE_0_32,
    "0.30.0": SINCE_0_32 | SINCE_0_31,
    "0.29.0": SINCE_0_32 | SINCE_0_31 | SINCE_0_30,
}
"""The tests that need what a version lacks. A test without parameters stands for all of its
parameters."""

FAILED = re.compile(r"^FAILED \S+?::(test_\w+)(\[.*?\])?(?: - .*)?$", re.MULTILINE)


@pytest.mark.parametrize("version", OTHERS)
def test_packings(version: str) -> None:
    python = interpreter(version)
    assert python is not None
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no"]
    run = subprocess.run(
        [*command, "tests/vllm/caches"],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    lacking = LACKING[version]
    failed = {
        name if name in lacking else name + parameters
        for name, parameters in FAILED.findall(run.stdout)
    }
    assert failed == lacking, run.stdout[-4000:]
    assert re.search(r"^\d+ failed, \d+ passed in ", run.stdout, re.MULTILINE), run.stdout[-4000:]
