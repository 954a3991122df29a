"""Generation, for training and for people: sampling, prompt files, chat."""
