"""Programs for machines with GPUs: what was measured there, and what the driver does."""
