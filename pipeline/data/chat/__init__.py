"""Chat formats, which convert dialogues to token ids."""
