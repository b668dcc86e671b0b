import unittest

from intervals import merge


class MergeTest(unittest.TestCase):
    def test_intervals_that_overlap_become_one(self):
        self.assertEqual(merge([(1, 5), (3, 8)]), [(1, 8)])

    def test_an_interval_within_another_disappears(self):
        self.assertEqual(merge([(1, 9), (2, 3)]), [(1, 9)])


if __name__ == "__main__":
    unittest.main()
