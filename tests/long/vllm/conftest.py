"""The same as in ``tests/vllm``."""

from tests.vllm.conftest import one_thread, pytest_collection_modifyitems

__all__ = ["one_thread", "pytest_collection_modifyitems"]
