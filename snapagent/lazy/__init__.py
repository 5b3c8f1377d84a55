"""Filling the memory of restored processes through userfaultfd, faults first."""
