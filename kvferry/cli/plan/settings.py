"""How an engine is set up, as text such as ``tp=2,pp=1,block_size=16,layout=LBHNC``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches

from kvferry.core.errors import KVFerryError
from kvferry.core.messages import MAX_RANKS

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""How memory can be nested, outermost first: Layers, Blocks, Heads, tokeNs, Content (K, then V)."""

WHOLE = "LB"
"""How layouts start in which the pages of a layer are whole and follow each other."""

ALIASES: Mapping[str, str] = {"HND": "LBHNC", "NHD": "LBNHC"}

LIMITS: Mapping[str, int] = {
    "tp": 1 << 10,
    "pp": 1 << 10,
    "dcp": 1 << 10,
    "interleave": 1 << 16,
    "block_size": 1 << 16,
    "kernel_block": 1 << 16,
}


class SettingsError(KVFerryError):
    """An engine cannot be set up like this; names the setting, what is allowed, and the nearest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """How one engine is set up.

    Attributes:
        tp, pp: ranks that share the heads, and ranks that share the layers.
        dcp: over how many of the tensor-parallel ranks a request's tokens are spread; they hold
            the same heads.
        interleave: tokens in a row on one of these.
        block_size: tokens of a page on one rank.
        layout: how memory is nested, one of ``ORDERS``.
        kernel_block: tokens of the blocks that kernels cut a page into; 0: they do not.

    Raises:
        SettingsError: no engine can be set up like this, whatever the model.
    """

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    interleave: int = 1
    block_size: int = 16
    layout: str = "LBNHC"
    kernel_block: int = 0

    def __post_init__(self) -> None:
        if self.tp * self.pp > MAX_RANKS:
            raise SettingsError(f"tp={self.tp},pp={self.pp} are more than {MAX_RANKS} ranks")
        if self.tp % self.dcp:
            raise SettingsError(
                f"dcp={self.dcp} does not divide tp={self.tp}: tokens are spread over ranks that "
                "share the heads"
            )
        if self.block_size % self.interleave:
            raise SettingsError(
                f"interleave={self.interleave} does not divide block_size={self.block_size}"
            )
        self._check_kernel_block()

    def _check_kernel_block(self) -> None:
        if self.kernel_block and self.block_size % self.kernel_block:
            raise SettingsError(
                f"kernel_block={self.kernel_block} does not divide block_size={self.block_size}"
            )
        if self.kernels > 1 and not self.layout.startswith(WHOLE):
            raise SettingsError(
                f"layout={self.layout} scatters the pages of a layer, so kernels cannot cut them: "
                f"use block_size={self.kernel_block} or a layout that starts with {WHOLE}"
            )

    @property
    def ranks(self) -> int:
        """How many there are; rank is ``pp * tp_size + tp``."""
        return self.tp * self.pp

    @property
    def kernels(self) -> int:
        """Into how many blocks kernels cut a page."""
        return self.block_size // self.kernel_block if self.kernel_block else 1

    def __str__(self) -> str:
        """As ``parse`` reads it, without what is as it is anyway."""
        optional = asdict(PlanSettings())
        shown = {k: v for k, v in asdict(self).items() if k in SHOWN or v != optional[k]}
        return ",".join(f"{key}={value}" for key, value in shown.items())


SHOWN = ("tp", "pp", "block_size", "layout")


def parse(text: str, option: str) -> PlanSettings:
    """The settings of one engine.

    Args:
        text: ``key=value`` pairs, with commas between.
        option: where it was given, for messages.

    Raises:
        SettingsError: a key or a value is unknown or out of bounds, or stands twice.
    """
    found: dict[str, int | str] = {}
    for pair in text.split(","):
        key, equals, value = (part.strip() for part in pair.partition("="))
        name = _known(
            option, "setting", key.replace("-", "_"), [f.name for f in fields(PlanSettings)]
        )
        if not equals or not value:
            raise SettingsError(f"{option}: {key!r} has no value: write {key}=...")
        if name in found:
            raise SettingsError(f"{option}: {name!r} stands twice")
        found[name] = _order(option, value) if name == "layout" else _count(option, name, value)
    try:
        return PlanSettings(**found)  # type: ignore[arg-type]  # each value is of its field's type
    except SettingsError as exc:
        raise SettingsError(f"{option}: {exc}") from None


def _order(option: str, value: str) -> str:
    name = value.upper()
    return ALIASES.get(name) or _known(option, "layout", name, [*ORDERS, *ALIASES])


def _count(option: str, name: str, value: str) -> int:
    limit = LIMITS[name]
    if not (value.isascii() and value.isdecimal() and len(value) < 10 and 1 <= int(value) <= limit):
        raise SettingsError(f"{option}: {name}={value[:32]} must be a number in 1 to {limit}")
    return int(value)


def _known(option: str, what: str, name: str, allowed: list[str]) -> str:
    if name in allowed:
        return name
    near = get_close_matches(name, allowed, 1, 0.5)
    meant = f": did you mean {near[0]!r}?" if near else ""
    raise SettingsError(
        f"{option}: unknown {what} {name[:32]!r}{meant} Allowed are {', '.join(allowed)}"
        if meant
        else f"{option}: unknown {what} {name[:32]!r}; allowed are {', '.join(allowed)}"
    )
