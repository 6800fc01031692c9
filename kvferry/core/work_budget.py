"""A bound on the work that data published by a peer can cause.

A few megabytes can describe layouts whose checks or plan would take hours. So work is counted
before it is done, in steps and not seconds: every machine refuses the same data. Work that is
linear in data of bounded size is not counted.
"""

from __future__ import annotations

from kvferry.core.errors import KVFerryError

MAX_STEPS = 10_000_000
"""The most steps, of 0.1 us, to check an engine or make a plan; one of 64 ranks takes a million."""

# The cost of each kind of work, in steps, unless the name says PER_STEP. Each cost is an upper
# estimate of what was measured.

LOOP_STEPS = 10  # one turn of a short Python loop

# Reading what an engine publishes (handshake.compatibility).

PAYLOAD_BYTES_PER_STEP = 8
"""Bytes of an encoded payload that are decoded per step; checks of its content cost extra."""
FACT_STEPS = 20
"""One key of a rank's ``agreement``, which is compared with the ranks before and after it."""

# Checking a layout (layout.layout, layout.fields, layout.overlap_check).

FIELD_STEPS = 40  # decoding one field and checking it by itself
REGION_STEPS = 20  # decoding one region and checking it
KIND_STEPS = 1
"""Comparing one field with one kind of field; with all, as hashes of untrusted data may collide."""
OVERLAP_SET_STEPS = 500
"""Preparing the fields of one kind, or of one group on one device, for an overlap check."""
OVERLAP_CLUSTER_STEPS = 100  # comparing one cluster: sets of bytes whose address ranges overlap
OVERLAP_MEMBER_STEPS = 5  # one set of bytes in such a cluster
OVERLAP_RUN_STEPS = 8
"""One run (contiguous range of bytes) of a set whose runs have to be enumerated."""

# Assigning who reads what (planner.coverage).

HOLDING_STEPS = 50
"""Recording which part of a tensor one rank holds, or comparing that part with another rank's."""
SPLIT_STEPS = 50  # splitting field sets that differ between ranks, for each field in them

# Finding strips (planner.strips, planner.coalesce).

SHAPE_STEPS = 500
"""Finding the strips of a pair of fields whose combination of shapes was not met before."""
MERGE_BOXES_STEPS = 500  # merging one list of boxes (runs of bytes repeated at strides) once
MERGE_RUN_STEPS = 3  # one run in a list of boxes that is merged
SELECTED_RUNS_PER_STEP = 20
"""Number of runs that are looked at per step when the runs of one length are selected."""
STRIP_STEPS = 5  # making one strip
BATCH_STEPS = 1000  # making one batch of strips; every request goes through all batches


class WorkBudget:
    """Count the steps of a task ("checking a layout", say); refuse more than ``MAX_STEPS``."""

    __slots__ = ("_error", "_task", "steps")

    def __init__(self, error: type[KVFerryError], task: str) -> None:
        self._error = error
        self._task = task
        self.steps = 0

    def spend(self, steps: int, where: str) -> None:
        """Add steps, before the work if possible; beyond the limit, raise and say ``where``."""
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise self._error(
                f"{self._task} takes {self.steps} steps or more, with {where}, and {MAX_STEPS} are "
                "allowed: describe memory with fewer and more regular fields, or use fewer ranks"
            )
