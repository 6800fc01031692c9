"""A bound on the work that data published by a peer can cause.

A few megabytes from an untrusted peer can describe layouts whose checks, or whose plan, would take
hours. So work is counted as it is done, mostly before it is done, and refused beyond a limit. It is
counted in steps and not in seconds: every machine refuses the same.

All costs stand in this module. Linear work that a limit on sizes already bounds is not counted:
splitting a field set by memory device, for instance, takes at most one pass over its fields for
each device, and every part is counted once it is compared (``OVERLAP_SET_STEPS``).
"""

from __future__ import annotations

from kvferry.core.errors import KVFerryError

MAX_STEPS = 10_000_000
"""The limit for all that one engine publishes, and for one plan. A step is about a tenth of a
microsecond, so this is about a second. An engine of 8 ranks and 80 layers takes some hundred
thousand steps, one of 64 ranks a million."""

# What things cost, in steps. Each is an upper estimate of what was measured.

LOOP_STEPS = 10
"""One turn of a short Python loop."""

# Reading what an engine publishes (handshake.compatibility).

PAYLOAD_BYTES_PER_STEP = 8
"""Bytes of an encoded payload that are decoded per step; checks of its content cost extra."""
FACT_STEPS = 20
"""One key of an agreement, which is compared with both neighbours' ranks."""

# Checking a layout (layout.layout, layout.fields, layout.overlap_check).

FIELD_STEPS = 40
"""Decoding one field and checking it by itself."""
REGION_STEPS = 20
"""Decoding one region and checking it."""
KIND_STEPS = 1
"""Comparing one field with one more kind: hashes of untrusted data may all collide."""
OVERLAP_SET_STEPS = 500
"""Preparing one set of strided bytes for an overlap check."""
OVERLAP_CLUSTER_STEPS = 100
"""Comparing one cluster of sets whose address ranges meet."""
OVERLAP_MEMBER_STEPS = 5
"""One member of such a cluster."""
OVERLAP_RUN_STEPS = 8
"""One contiguous run of a set that has to be enumerated."""

# Assigning who reads what (planner.coverage).

HOLDING_STEPS = 50
"""What one rank holds of a tensor."""
SPLIT_STEPS = 50
"""One field, where field sets have to be split because they differ between ranks."""

# Finding strips (planner.strips, planner.coalesce).

SHAPE_STEPS = 500
"""One shape of overlapping fields that was not met before."""
MERGE_BOXES_STEPS = 500
"""Merging one list of boxes once."""
MERGE_RUN_STEPS = 3
"""One run in such a list."""
SELECTED_RUNS_PER_STEP = 20
"""Runs that are looked at per step to select those of one length."""
STRIP_STEPS = 5
"""Making one strip."""
BATCH_STEPS = 1000
"""One batch of strips: every request goes through all of them."""


class WorkBudget:
    """Counts the steps that one task takes, and refuses those above ``MAX_STEPS``.

    Args:
        error: type of the error that is raised when the budget is exceeded.
        task: what takes the steps, for the message: "checking a layout".

    Attributes:
        steps: how many steps were spent.
    """

    __slots__ = ("_error", "_task", "steps")

    def __init__(self, error: type[KVFerryError], task: str) -> None:
        self._error = error
        self._task = task
        self.steps = 0

    def spend(self, steps: int, where: str) -> None:
        """Count steps before they are taken.

        Args:
            steps: how many.
            where: what they are taken for, for the message.

        Raises:
            KVFerryError: of the type given, if more than ``MAX_STEPS`` steps were spent in all.
        """
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise self._error(
                f"{self._task} takes {self.steps} steps or more, with {where}, and {MAX_STEPS} are "
                "allowed: describe memory with fewer and more regular fields, or use fewer ranks"
            )
