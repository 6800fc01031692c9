"""What maintainers found out about the differences between vLLM 0.32 and 0.33.

Differences whose meaning follows from a table of the connector, such as a backend in ``PACKINGS``,
need no entry. When 0.33 is taken on, these entries go, and the next version's come.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.integrations.vllm.next_version.comparison import Verdicts

CORE = "distributed/kv_transfer/kv_connector/utils.py: KVOutputAggregator"
RUNNER = "v1/worker/gpu/kv_connector.py"
BACKENDS = "v1/attention/backends"

REPLAYED = "the reports of a failed step come with those of the next, and add up as any others"
DRAFTER = "results are taken before a drafter runs: `test_connector.py`"
SLEEP = "refused, so that peers never read memory that is gone: `unregister_kv_caches`"
REWOKEN = "the same metadata again changes nothing: `FerryScheduler`"
SAME_BYTES = "the same bytes in the same places"
SCALE_OF_ONE = "leaves out a scale that is 1: the same bytes"
MX_SCALES = "on SM100 a row's scale is four bytes, not a float32: `versions.indexer_scales`"
RECORDS = "V4.1's rows hold their scales: `versions.has_records`"
INTERLEAVED = "V may be interleaved: `ROCM_ATTN/interleaved V`"
ELSEWHERE = "opaque: these kernels run on processors that they were not checked on"
UNREAD = "opaque: these kernels were not read"
OCTAVE = "opaque: no packing takes this format"

VERDICTS: Mapping[str, Verdicts] = {
    "Hooks of the connector": {
        "KVConnectorBase_V1.restore_kv_caches": "never called: the engine does not fall asleep",
    },
    "Calls of hooks": {
        "config/vllm.py: VllmConfig._verify_kv_transfer_compat": SLEEP,
        "v1/core/sched/scheduler.py: Scheduler._drain_deferred_loads": "HiSparse is refused",
        "v1/core/sched/scheduler.py: Scheduler.schedule": "HiSparse is refused",
        "v1/engine/core.py: EngineCore.__init__": "moved to the next function",
        "v1/engine/core.py: EngineCore._set_kv_connector_handshake_metadata": REWOKEN,
        f"{RUNNER}: ActiveKVConnector.finalize_step": DRAFTER,
        f"{RUNNER}: ActiveKVConnector.post_forward": DRAFTER,
        "v1/worker/gpu_worker.py: Worker.discard": SLEEP,
        "v1/worker/gpu_worker.py: Worker.sleep": SLEEP,
        "v1/worker/gpu_worker.py: Worker.wake_up": "never called after a refused sleep",
    },
    "What drives connectors": {
        f"{CORE}.__init__": REPLAYED,
        f"{CORE}.aggregate": REPLAYED,
        f"{CORE}.ft_defer_kv_connector_outputs": REPLAYED,
        "distributed/kv_transfer/kv_connector/utils.py: yield_req_data": "not used",
        "distributed/kv_transfer/kv_transfer_state.py: ensure_kv_transfer_initialized": (
            "the context-parallel interleave is known earlier; it is read when caches are "
            "registered"
        ),
        "v1/outputs.py: AsyncModelRunnerOutput.get_kv_connector_output": REPLAYED,
        f"{RUNNER}: ActiveKVConnector.finalize_step": DRAFTER,
        f"{RUNNER}: ActiveKVConnector.post_forward": DRAFTER,
        f"{RUNNER}: KVConnector.finalize_step": DRAFTER,
        f"{RUNNER}: KVConnector.post_forward": DRAFTER,
    },
    "Specs of caches": {
        "KVCacheSpec.is_draft": "read by `layer_facts`, beside the layer's name",
        "MLAAttentionSpec.topk_buffer_width": "of a buffer outside the cache",
    },
    "Attention backends": {
        "DEEPSEEK_V4_ROCM_MXFP4_INDEXER": ELSEWHERE,
        "FLASH_ATTN": "Step 5's class splits pages into K and V as the others do",
        "MINIMAX_M3_SPARSE_INDEXER": "only the kernels that select blocks are others",
        "ROCM_FLASHMLA_SPARSE_DSV41": ELSEWHERE,
        "ROCM_OCTAVE": ELSEWHERE,
        "STEP5_CSA_SUMMARY": UNREAD,
        "STEP5_CSA_TAIL_RING": UNREAD,
        "ROCM_FLASHMLA_SPARSE_DSV4": "V4.1's class has a name of its own now; both are opaque",
    },
    "Functions that fill pages": {
        "model_executor/layers/attention/mla_attention.py": SCALE_OF_ONE,
        "model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py": "more states per prompt",
        "models/deepseek_v4/compressor.py": "code that was in `forward`",
        "models/deepseek_v41/amd/rocm.py": "moved to `rocm_paged_mxfp4_indexer.py`; opaque",
        "models/dots3_note/nvidia/attention.py": SCALE_OF_ONE,
        "models/qwen4_exp/amd/qsa.py": OCTAVE,
        "models/qwen4_exp/common/qsa_cache.py": "the same capacity, said otherwise",
        f"{BACKENDS}/mla/amx_mla.py": SCALE_OF_ONE,
        f"{BACKENDS}/mla/cpu_mla.py": SCALE_OF_ONE,
        f"{BACKENDS}/mla/sparse_swa.py": RECORDS,
        f"{BACKENDS}/rocm_aiter_fa.py": (
            "shuffled fp8 pages have the layer's scales, which 0.32 ignores: opaque, and opaque "
            "pages name vLLM's version"
        ),
        f"{BACKENDS}/rocm_aiter_unified_attn.py": (
            "shuffled on gfx1250, if AITER shuffles: opaque there "
            "(`ROCM_AITER_UNIFIED_ATTN/shuffled`)"
        ),
        f"{BACKENDS}/rocm_attn.py": INTERLEAVED,
        f"{BACKENDS}/triton_attn.py": SAME_BYTES,
        "v1/attention/ops/paged_attn.py": INTERLEAVED,
        "v1/attention/ops/prefix_prefill.py": INTERLEAVED,
        "v1/attention/ops/rocm_paged_mxfp4_indexer.py": "opaque",
        "v1/attention/ops/triton_reshape_and_cache_flash.py": INTERLEAVED,
    },
    "Kernels in C++": {
        "csrc/attention/octave_attn.cu": OCTAVE,
        "csrc/cache_kernels.cu": f"{MX_SCALES}; {INTERLEAVED}",
        "csrc/cpu/cpu_attn_amx.hpp": "only scales while reading",
        "csrc/cpu/cpu_attn_impl.hpp": "only the order of work",
        "csrc/fused_deepseek_v4_qnorm_rope_kv_insert_kernel.cu": RECORDS,
        "csrc/fused_muse_spark_qknorm_rope_kv_insert_kernel.cu": (
            "writes as `reshape_and_cache_flash` does"
        ),
        "csrc/fused_qknorm_rope_cache_kernel.cu": "Step 5's; writes by the cache's strides",
        "csrc/ops.h": "only declarations",
        "csrc/rocm/attention.cu": f"split into the next two, which only read; {INTERLEAVED}",
        "csrc/rocm/attention_dispatch.cu": "only reads",
        "csrc/rocm/attention_kernels.cuh": f"only reads; {INTERLEAVED}",
        "csrc/rocm/ops.h": "only declarations",
    },
    "Quantised formats, orders and other values": {
        "AttentionBackendEnum.FLASH_ATTN_MLA_SPARSE_FA4": "see the backend",
        "AttentionBackendEnum.ROCM_FLASHMLA_SPARSE_DSV41": "see the backend",
        "AttentionBackendEnum.ROCM_OCTAVE": "see the backend",
        "AttentionBackendEnum.STEP5_DSA": "see the backend",
        "CacheDType 'octave_k3v3'": OCTAVE,
        "CacheDType 'octave_k3v3_compact'": OCTAVE,
        "CacheDType 'octave_k3v4'": OCTAVE,
        "KVQuantMode.CUSTOM": OCTAVE,
        "KVQuantMode.OCTAVE_K3V3": OCTAVE,
        "KVQuantMode.OCTAVE_K3V3_COMPACT": OCTAVE,
        "KVQuantMode.OCTAVE_K3V4": OCTAVE,
    },
    "Keys of tickets": {
        "NIXL_CONNECTOR_VERSION": "only of NixlConnector's handshake",
        "remote_registration_generation": (
            "not made: the incarnation says that an engine is another one, and caches are "
            "registered once"
        ),
    },
}
"""Verdicts by ``Section.title`` and ``Finding.name``."""
