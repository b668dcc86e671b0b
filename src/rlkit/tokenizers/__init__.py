"""Find and load the tokenizer of a model: in a folder, an installed package or the Hugging Face hub.

The third-party package `tokenizers` is something else; only `engine/model/` imports it.
"""
