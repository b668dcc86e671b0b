"""The wire format of Tinker requests and answers."""
