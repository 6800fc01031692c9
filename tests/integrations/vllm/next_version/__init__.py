"""What the next vLLM changes for the connector, read from its source."""
