"""From dialogues to token ids."""
