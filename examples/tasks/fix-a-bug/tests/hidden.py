import sys
import unittest

sys.path.insert(0, "/app")

from intervals import merge


class MergeTest(unittest.TestCase):
    def test_intervals_that_overlap_become_one(self):
        self.assertEqual(merge([(1, 5), (3, 8)]), [(1, 8)])

    def test_an_interval_within_another_disappears(self):
        self.assertEqual(merge([(1, 9), (2, 3)]), [(1, 9)])

    def test_intervals_that_touch_become_one(self):
        self.assertEqual(merge([(3, 4), (1, 2), (6, 7)]), [(1, 4), (6, 7)])

    def test_the_argument_is_not_changed(self):
        given = [(5, 6), (1, 2)]
        merge(given)
        self.assertEqual(given, [(5, 6), (1, 2)])

    def test_nothing_gives_nothing(self):
        self.assertEqual(merge([]), [])


if __name__ == "__main__":
    unittest.main()
