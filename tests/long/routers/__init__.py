"""Routers between HTTP clients and two engines: vllm-router and the proxies of vLLM's source."""
