"""Play environments with a policy, and record every token."""
