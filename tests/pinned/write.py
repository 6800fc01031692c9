"""Pin the bytes of samples that are new: ``python -m tests.pinned.write``.

Samples that are pinned already stay as they are, even if this build makes other bytes. To pin those
bytes, remove the sample from ``bytes.txt`` by hand first.
"""

from __future__ import annotations

import sys

from tests.pinned import store
from tests.pinned.samples import SAMPLES


def main() -> int:
    """Write the file.

    Returns:
        0, or 1 if this build makes other bytes than are pinned.
    """
    pinned = store.load()
    made = {name: sample.make() for name, sample in SAMPLES.items()}
    changed = [name for name in pinned if name in made and made[name] != pinned[name]]
    for name in changed:
        sys.stderr.write(f"{name}: other bytes are pinned, and they stay\n")
    for name in pinned.keys() - made.keys():
        sys.stderr.write(f"{name}: there is no sample of this name; its bytes stay\n")
    kept = {name: data for name, data in pinned.items() if name not in made}
    store.save({name: pinned.get(name, data) for name, data in made.items()} | kept)
    return 1 if changed else 0


if __name__ == "__main__":
    raise SystemExit(main())
