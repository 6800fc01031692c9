"""A vLLM engine beside one of LMCache's cache servers: answers one prompt, and prints what it did.

    python -m tests.lmcache.engine MODEL PORT

Prints, as JSON, the tokens that were generated, and how many of the prompt's were not computed.
With port 0, the engine has no cache server.
"""

from __future__ import annotations

import json
import os
import sys
import time

PROMPT = [(7 * n) % 500 for n in range(520)]
STORE_SECONDS = 4.0
"""How long LMCache gets to store what was computed: it does not say when it has."""


def leave_llvmlite_out() -> None:
    """Let vLLM 0.32 look through all modules for kernels, but not llvmlite's, at which it stops.

    Their functions answer to every attribute, and LMCache imports them before the engine starts.
    """
    from vllm.triton_utils import dispatcher

    look = dispatcher._rebind_kernels

    def without(overrides: object) -> None:
        names = [name for name in sys.modules if name.startswith("llvmlite")]
        hidden = {name: sys.modules.pop(name) for name in names}
        try:
            look(overrides)
        finally:
            sys.modules.update(hidden)

    dispatcher._rebind_kernels = without


def main(model: str, port: int) -> None:
    """Answer the prompt."""
    from examples.vllm_disaggregated import ENGINE, ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    from vllm import LLM, SamplingParams

    leave_llvmlite_out()
    extra = {
        "lmcache.mp.host": "tcp://127.0.0.1",
        "lmcache.mp.port": port,
        "lmcache.mp.mp_transfer_mode": "engine_driven",  # the one for CPUs
    }
    cache = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    engine = LLM(model=model, kv_transfer_config=cache if port else None, **ENGINE)
    sampling = SamplingParams(temperature=0, max_tokens=16)
    [answer] = engine.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
    time.sleep(STORE_SECONDS)
    said = {"tokens": list(answer.outputs[0].token_ids), "cached": answer.num_cached_tokens}
    sys.stdout.write(f"\n{json.dumps(said)}\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
