"""Rewards that programs give: a user's functions, verifiers, sandboxed tests, endpoints."""
