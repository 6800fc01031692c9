"""Dynamo's frontend and workers, run on the CPU with kvferry between them (``make dynamo``)."""
