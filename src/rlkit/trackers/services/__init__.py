"""Services that show runs."""
