"""What the packings say about a page is what the backends of every version say."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.integrations.vllm.engines import ENVIRONMENT, ROOT
from tests.integrations.vllm.versions.environments import OTHERS, interpreter

pytestmark = [pytest.mark.versions, pytest.mark.timeout(600)]

OF_THE_NEWEST = (
    "has_a_verdict",
    "up_to_date",
    "what_is_refused",
    "opaque_pages_of_unlike_orders",
    "NVFP4_DS_MLA",
    "B12X",
    "FLASHINFER_MLA_SPARSE_SM90",
    "ROCM_SEGMENTED_ATTN",
    "TRITON_FLASH",
    "what_is_not_certain_is_opaque and FLASHMLA",
)
"""Tests of the tables' completeness, which holds for the newest version, or of what older ones do
not have."""


@pytest.mark.parametrize("version", OTHERS)
def test_packings(version: str) -> None:
    python = interpreter(version)
    assert python is not None
    excluded = " or ".join(f"({each})" for each in OF_THE_NEWEST)
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "vllm"]
    run = subprocess.run(
        [*command, "-k", f"not ({excluded})", "tests/integrations/vllm/caches"],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout
