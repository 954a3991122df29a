"""Rewards from programs: user functions, verifiers, sandboxed tests, endpoints."""
