"""The server of the engine: the Tinker REST protocol, its requests in order, and the models that answer them."""
