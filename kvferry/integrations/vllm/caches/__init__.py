"""What vLLM allocated, as a layout: what a page's bytes mean is data here, one entry per kind.

A new kind of cache is an entry in one of three tables: ``specs.SPECS`` (is a page a run of tokens,
a state, or refused), ``packings.PACKINGS`` (how an attention backend fills a page, with a function
of ``insides``), or ``states.STATE_LAYOUTS`` (the parts of a recurrent state).
"""
