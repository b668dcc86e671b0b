"""Records of a run for readers: the text of its tokens, and what the trainer computed for each of them."""
