"""Records of other tools, shown on the same pages as runs of rlkit."""
