"""UCX: one-sided transfers of whichever libucp is there, without NIXL."""
