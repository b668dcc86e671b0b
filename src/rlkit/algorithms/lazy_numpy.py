"""numpy as `np`, imported at its first use.

Estimators and losses are part of the configuration's schema, and reading a configuration loads no numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
else:

    class _Numpy:
        def __getattr__(self, name: str) -> object:
            import numpy

            return getattr(numpy, name)

    np = _Numpy()

__all__ = ["np"]
