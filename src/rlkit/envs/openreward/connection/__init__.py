"""Connections to OpenReward: the SDK, clients, servers, secrets."""
