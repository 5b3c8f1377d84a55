"""Content-addressed, deduplicating, verified storage for snapshots of GPU workloads."""
