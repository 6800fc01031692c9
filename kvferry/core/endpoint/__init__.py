"""One rank's end of everything; see ``Endpoint``."""

from kvferry.core.endpoint.context import Load
from kvferry.core.endpoint.endpoint import Endpoint
from kvferry.core.endpoint.options import EndpointOptions, Identity, Results
from kvferry.core.stats import LoadRecord

__all__ = ["Endpoint", "EndpointOptions", "Identity", "Load", "LoadRecord", "Results"]
