"""Memory that outlives its process: the broker that owns it, and its way to and from a store."""
