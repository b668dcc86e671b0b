"""Mathematics with answers that can be checked."""

from rlkit.envs.math.arithmetic import Sum, arithmetic

__all__ = ["Sum", "arithmetic"]
