"""The transfer channel and its plugin in LMCache's own classes, over loopback."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.transfer_channel import TransferChannelAddress as Address
from lmcache.v1.distributed.transfer_channel import TransferChannelReadResult
from lmcache.v1.distributed.transfer_channel.factory import create_transfer_channel_context

from kvferry.core.errors import HandshakeError
from kvferry.core.security import generate
from kvferry.integrations.lmcache import KVFerryClient, KVFerryContext, configure
from kvferry.integrations.lmcache.settings import VARIABLE, settings
from tests.free_port import free_port

pytestmark = pytest.mark.filterwarnings("ignore")

NBYTES = 1 << 20


class Node:
    """A context as LMCache makes it, and its memory."""

    def __init__(self, fill: int, port: int = 0) -> None:
        self.memory = np.full(NBYTES, fill, np.uint8)
        self.url = f"127.0.0.1:{port or free_port()}"
        context = create_transfer_channel_context(
            "kvferry",
            L1MemoryDesc(ptr=self.memory.ctypes.data, size=NBYTES, align_bytes=4096),
            listen_url=self.url,
            advertise_url=self.url,
            backends=["UCX"],
        )
        assert isinstance(context, KVFerryContext)
        self.context = context


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Node]]:
    """Make nodes with default settings, which are closed after the test."""
    monkeypatch.setattr("kvferry.integrations.lmcache.settings._configured", None)
    monkeypatch.delenv(VARIABLE, raising=False)
    with ExitStack() as stack:

        def make(fill: int = 0, port: int = 0) -> Node:
            made = Node(fill, port)
            stack.callback(made.context.close)
            return made

        yield make


def result(client: KVFerryClient, task: int) -> TransferChannelReadResult:
    """Ask until a read is over, as LMCache does."""
    deadline = time.monotonic() + 20
    while not (found := client.query_read_status(task)).is_finished():
        assert found.succeeded_mask == []
        assert time.monotonic() < deadline
    return found


def test_success_is_told_for_each_object(node: Callable[..., Node]) -> None:
    here, there = node(0), node(7)
    client = here.context.get_transfer_channel_client(there.url)
    local = [Address(offset=n << 12, size=4096) for n in range(8)]
    # LMCache's mark for an object that was not found; and what a peer might make up.
    bad = [(-1, 4096), (NBYTES - 1, 4096), (1 << 70, 4096), (0, 8192)]
    good = [(n << 12, 4096) for n in range(4)]
    remote = [Address(*each) for pair in zip(good, bad, strict=True) for each in pair]
    found = result(client, client.submit_read(local, remote))
    assert found.succeeded_mask == [True, False] * 4
    assert here.memory.reshape(-1, 4096)[:8].max(axis=1).tolist() == [7, 0] * 4
    nothing = client.submit_read(local[:1], remote[1:2])
    assert result(client, nothing).succeeded_mask == [False]


@pytest.mark.parametrize(
    ("local", "remote"),
    [([(0, 8)], []), ([(NBYTES, 8)], [(0, 8)]), ([(-8, 8)], [(0, 8)])],
)
def test_the_callers_mistakes_are_refused(
    node: Callable[..., Node], local: list[tuple[int, int]], remote: list[tuple[int, int]]
) -> None:
    here, there = node(), node(7)
    client = here.context.get_transfer_channel_client(there.url)
    with pytest.raises(ValueError, match="local"):
        client.submit_read([Address(*each) for each in local], [Address(*each) for each in remote])
    assert not here.memory.any()


def test_a_restarted_server_has_a_new_client_and_removing_the_old_one_keeps_it(
    node: Callable[..., Node],
) -> None:
    here, first = node(), node(1)
    url, objects = first.url, [Address(offset=0, size=4096)]
    old = here.context.get_transfer_channel_client(url)
    assert here.context.get_transfer_channel_client(url) is old
    first.context.close()
    second = node(2, int(url.rpartition(":")[2]))
    assert result(old, old.submit_read(objects, objects)).succeeded_mask == [False]
    # LMCache finds the restarted server before it gives the one that has ended up.
    new = here.context.get_transfer_channel_client(second.url)
    here.context.remove_transfer_channel_client(url)
    assert here.context.get_num_connected_clients() == 1
    assert result(new, new.submit_read(objects, objects)).succeeded_mask == [True]
    assert here.memory[:4096].tolist() == [2] * 4096
    assert result(old, old.submit_read(objects, objects)).succeeded_mask == [False]
    here.context.remove_transfer_channel_client(url)
    here.context.remove_transfer_channel_client(url)
    assert here.context.get_num_connected_clients() == 0


# Settings.


def test_lmcaches_plugin_sets_the_settings_and_finds_nothing(node: Callable[..., Node]) -> None:
    key = ObjectKey(chunk_hash=b"1" * 4, model_name="m", kv_rank=0)
    adapter = create_l2_adapter(
        PluginL2AdapterConfig.from_dict(
            {
                "module_path": "kvferry.integrations.lmcache",
                "class_name": "KVFerryPlugin",
                "adapter_params": {"read_timeout": 3, "driver_options": {"threads": 1}},
            }
        ),
        L1MemoryDesc(ptr=1 << 20, size=1 << 20, align_bytes=4096),
    )
    try:
        assert (settings().read_timeout, settings().driver_options) == (3.0, {"threads": 1})
        node()  # the settings are used
        layout = {0: MemoryLayoutDesc(shapes=[], dtypes=[])}
        asked = adapter.submit_lookup_and_lock_task([key], layout)
        found = adapter.query_lookup_and_lock_result(asked)
        assert found is not None
        assert not found.test(0)
        assert adapter.query_lookup_and_lock_result(asked) is None
        stored = adapter.submit_store_task([key], [])
        assert adapter.pop_completed_store_tasks()[stored].is_successful()
        assert adapter.pop_completed_store_tasks() == {}
    finally:
        adapter.close()


def test_the_environment_is_read_where_no_plugin_is(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    mine, yours = generate(), generate()
    keyed = {"curve_secret_key": "env:OWN_KEY", "curve_peers": [mine.public.hex()]}
    monkeypatch.setenv("OWN_KEY", mine.secret.hex())
    monkeypatch.setenv(VARIABLE, json.dumps(keyed))
    here, there = node(), node(7)
    objects = [Address(offset=0, size=4096)]
    client = here.context.get_transfer_channel_client(there.url)
    assert result(client, client.submit_read(objects, objects)).succeeded_mask == [True]
    monkeypatch.setenv("OWN_KEY", yours.secret.hex())
    with pytest.raises(HandshakeError):
        node().context.get_transfer_channel_client(there.url)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"drivers": "ucx"}, "drivers"),
        ({"read_timeout": 0}, "read_timeout"),
        ({"curve_peers": "key"}, "curve_peers"),
        ({"allowed_peers": "everywhere"}, "anywhere"),
    ],
)
def test_wrong_settings_are_refused_by_name(wrong: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        configure(wrong)
