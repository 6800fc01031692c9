"""A ticket and a load to test parts of an endpoint with."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvferry.core.endpoint.load import Load
from kvferry.core.layout import HOLE
from kvferry.core.lifecycle.holds import Hold, Incarnation, RequestId
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.planner.build_copies import Pages


def sample_ticket(request: str = "p-1", engine: str = "prefill", generation: int = 7) -> Ticket:
    return Ticket(
        engine=engine,
        incarnation=Incarnation(5),
        request=request,
        host="127.0.0.1",
        port=1,
        hold=Hold(slot=3, generation=generation),
        pages=((1, 2),),
        first_index=(4,),
        tokens=8,
        digest=b"0" * 16,
        computed=True,
        tp_size=1,
    )


def sample_load(request: str = "d-1", **how: Any) -> Load:
    ids = np.array([5, HOLE, 6], dtype=np.int64)
    parts: dict[str, Any] = {
        "ranges": ((2, 8), None, (0, 4)),
        "local": (Pages(ids=ids, first_index=0),),
        **how,
    }
    return Load(request=RequestId(request), ticket=sample_ticket(), **parts)
