"""The defaults of the options. This module imports nothing, so that the options need nothing."""

TOTAL_SECONDS = 590.0
"""For all steps together, by default."""

DRIVERS = ("nixl", "ucx")
"""The drivers that are checked by default."""

OVER_TCP = ("nixl",)
"""Those of them that read GPU memory over tcp; ucx refuses to."""

SUITE_SECONDS = 52.0
"""For each run of the suite: afterwards, no further test begins."""
