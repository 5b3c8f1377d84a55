"""Programs that measure and prove what needs a real GPU; each writes JSON."""
