"""Rewards from programs: users' functions, verifiers, sandboxed tests, endpoints."""
