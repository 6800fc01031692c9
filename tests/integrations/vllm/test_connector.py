"""`KVFerryConnector` as vLLM finds, builds and calls it."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_import_loads_neither_vllm_nor_torch() -> None:
    """vLLM's plugin loader imports the plugin everywhere, also where no engine starts."""
    code = (
        "import sys, kvferry.integrations.vllm\n"
        "from importlib.metadata import entry_points\n"
        "[plugin] = entry_points(group='vllm.general_plugins', name='kvferry')\n"
        "assert callable(plugin.load())\n"
        "print({'vllm', 'torch', 'zmq'} & set(sys.modules))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert output.stdout == b"set()\n"


def test_unknown_name_in_the_package() -> None:
    import kvferry.integrations.vllm as package

    with pytest.raises(AttributeError, match="Connector2"):
        package.KVFerryConnector2  # noqa: B018  # type: ignore[attr-defined]
