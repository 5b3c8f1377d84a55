"""How a tree is recreated below a directory, and how that directory appears all at once."""
