"""The endpoint: serves one rank's pages to other engines, and loads pages from them."""

from kvferry.core.endpoint.endpoint import Endpoint, Identity, Results
from kvferry.core.endpoint.load import Load
from kvferry.core.endpoint.staging_copies import PageCopies
from kvferry.core.metrics import LoadRecord
from kvferry.core.options import EndpointOptions

__all__ = ["Endpoint", "EndpointOptions", "Identity", "Load", "LoadRecord", "PageCopies", "Results"]
