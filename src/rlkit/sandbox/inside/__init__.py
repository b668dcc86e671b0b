"""Code of the first process of a sandbox, which starts without rlkit, from this folder alone.

Invariant: nothing here imports from outside the standard library and this folder, nor anything once the host's file
system is out of reach.
"""
