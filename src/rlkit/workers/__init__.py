"""Workers: processes, on this machine or on a Ray cluster, that run the code of environments.

Invariant: at a fixed seed, a run has the same tokens, rewards and metrics wherever its rollouts are played.
"""
