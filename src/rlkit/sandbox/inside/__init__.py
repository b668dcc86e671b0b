"""Code of processes inside a sandbox; the first process loads this folder only, without the rest of rlkit.

Invariant: modules here import only the standard library and each other, and import nothing after the host's file
system is unmounted.
"""
