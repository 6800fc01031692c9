"""The transports that come with kvferry; of its other packages they import only the core."""
