"""How a driver gets its options from those of the user."""

from __future__ import annotations

from typing import Annotated

import msgspec
import pytest

from kvferry.core.errors import DriverError
from kvferry.core.transport import parse_options


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    threads: Annotated[int, msgspec.Meta(ge=1, le=4)] = 2
    backend: str = "fast"


def test_options_are_the_struct_that_declares_them() -> None:
    assert parse_options("mine", Options, {"threads": 3}) == Options(threads=3)


@pytest.mark.parametrize(
    "options", [{"thread": 3}, {"threads": "3"}, {"threads": 9}, {"backend": None}]
)
def test_an_invalid_option_is_refused_and_all_options_are_listed(
    options: dict[str, object],
) -> None:
    with pytest.raises(DriverError, match=r"of mine: .*has.*threads \(2\), backend \(fast\)"):
        parse_options("mine", Options, options)
