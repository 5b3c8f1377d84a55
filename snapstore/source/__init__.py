"""What a directory to push is: its tree, its ranks, its data classes, what it needs to run."""
