"""Generation for training and for users: sampling, prompt files, chat."""
