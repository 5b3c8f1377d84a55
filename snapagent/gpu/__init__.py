"""Memory of GPUs: hashed, filled and stored where it is."""
