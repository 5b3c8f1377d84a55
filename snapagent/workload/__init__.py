"""What runs inside of the processes that are captured; the standard library suffices for it."""
