"""Conversion of dialogues to token ids."""
