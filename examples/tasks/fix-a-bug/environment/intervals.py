"""Closed intervals of whole numbers."""


def merge(intervals):
    """The union of intervals as the fewest intervals, in ascending order.

    Intervals that touch, such as (1, 2) and (3, 4), become one. The argument is not changed.
    """
    intervals.sort()
    merged = []
    for low, high in intervals:
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], high)
        else:
            merged.append((low, high))
    return merged
