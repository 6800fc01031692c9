"""A process with a region exchange, for tests of ``RegionExchange``: to be killed or stopped."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import numpy as np

from kvferry import RegionExchange, create_transport, region_of

NBYTES = 1 << 22


def content(seed: int, nbytes: int = NBYTES) -> np.ndarray:
    """Return the bytes of the region of a peer with this seed."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@dataclass(slots=True, kw_only=True)
class ExchangePeer:
    """A peer in a process of its own, which the test ends."""

    process: subprocess.Popen[str]
    port: int

    @classmethod
    def start(cls, driver: str, seed: int, port: int = 0) -> ExchangePeer:
        """Start a process, and wait until its exchange listens."""
        command = [sys.executable, "-m", "tests.core.exchange_peer", driver, str(seed), str(port)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        return cls(process=process, port=int(process.stdout.readline()))

    def kill(self) -> None:
        """Kill the process, stopped or not."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def main(driver: str, seed: str, port: str) -> None:
    """Serve the content of a seed until standard input ends."""
    memory = content(int(seed))
    with RegionExchange(
        "test",
        region_of(memory),
        driver=driver,
        transport=create_transport(driver),
        port=int(port),
    ) as exchange:
        sys.stdout.write(f"{exchange.port}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
