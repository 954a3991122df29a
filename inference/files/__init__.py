"""Responses to a file of prompts."""
