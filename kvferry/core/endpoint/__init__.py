"""One rank's end of everything; see ``Endpoint``."""

from kvferry.core.endpoint.endpoint import Endpoint, EndpointOptions, Identity, Results
from kvferry.core.endpoint.pulling import Load
from kvferry.core.stats import LoadRecord

__all__ = ["Endpoint", "EndpointOptions", "Identity", "Load", "LoadRecord", "Results"]
