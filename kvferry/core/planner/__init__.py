"""Which bytes each rank reads from which other, and the copies that read them."""
